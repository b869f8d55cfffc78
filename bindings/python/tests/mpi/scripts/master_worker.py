"""A master gives tasks to workers as they become free, so the results arrive in any order."""

from mpi4py import MPI

WORK, DONE, STOP = 1, 2, 3
comm = MPI.COMM_WORLD
status = MPI.Status()

if comm.rank == 0:
    tasks, answers = list(range(20)), {}
    stopped = 0
    while stopped < comm.size - 1:
        comm.probe(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
        worker, tag = status.Get_source(), status.Get_tag()
        answer = comm.recv(source=worker, tag=tag)
        if tag == DONE:
            answers[answer[0]] = answer[1]
        if tasks:
            comm.send(tasks.pop(), dest=worker, tag=WORK)
        else:
            comm.send(None, dest=worker, tag=STOP)
            stopped += 1
    print(f"0: {sorted(answers.items())}")
else:
    comm.send(None, dest=0, tag=WORK)
    while True:
        task = comm.recv(source=0, tag=MPI.ANY_TAG, status=status)
        if status.Get_tag() == STOP:
            break
        comm.send((task, task**2), dest=0, tag=DONE)
print(f"{comm.rank}: done")
