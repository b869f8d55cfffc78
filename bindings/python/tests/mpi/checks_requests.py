"""Checks of requests: calls that wait for one or several requests, calls that test requests, persistent requests, and
generalized requests."""

import numpy as np

from ringtrain.mpi import MPI


def check_null_requests(comm):
    R = MPI.Request
    assert MPI.REQUEST_NULL.wait() is None
    assert MPI.REQUEST_NULL.Wait() is True
    assert MPI.REQUEST_NULL.test() == (True, None)
    assert R.Waitany([]) == MPI.UNDEFINED
    assert R.waitany([]) == (MPI.UNDEFINED, None)
    assert R.testany([]) == (MPI.UNDEFINED, True, None)
    assert R.testall([]) == (True, [])
    assert R.waitall([]) == []
    assert R.Waitsome([]) is None
    assert R.testsome([]) == (None, None)
    assert not MPI.REQUEST_NULL
    assert MPI.REQUEST_NULL == MPI.Request()


def start_ring_messages(comm, count=5):
    """Starts to send `count` messages to the next rank, and to receive `count` messages from `before`, the previous rank.
    Returns the buffers for the messages, the requests of the receives, the requests of the sends, and `before`."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    buffers = [np.zeros(100 * (i + 1)) for i in range(count)]
    received = [comm.Irecv(buffer, before, i) for i, buffer in enumerate(buffers)]
    sent = [comm.Isend(np.full(100 * (i + 1), float(comm.rank + i)), after, i) for i in range(count)]
    return buffers, received, sent, before


def all_messages_arrived(buffers, before):
    """Returns whether every buffer contains the message that rank `before` has sent in `start_ring_messages`."""
    return all((buffer == before + i).all() for i, buffer in enumerate(buffers))


def check_wait_all(comm):
    buffers, received, sent, before = start_ring_messages(comm)
    statuses = []
    MPI.Request.Waitall(received, statuses)
    assert [(s.source, s.tag) for s in statuses] == [(before, i) for i in range(5)]
    assert MPI.Request.Waitall(sent)
    assert all_messages_arrived(buffers, before)
    assert not any(received)


def check_wait_any(comm):
    buffers, received, sent, before = start_ring_messages(comm)
    found = set()
    status = MPI.Status()
    while len(found) < 5:
        i = MPI.Request.Waitany(received, status)
        assert status.tag == i
        found.add(i)
    assert MPI.Request.Waitany(received) == MPI.UNDEFINED
    MPI.Request.Waitall(sent)
    assert all_messages_arrived(buffers, before)


def check_wait_some(comm):
    buffers, received, sent, before = start_ring_messages(comm)
    found = []
    while (some := MPI.Request.Waitsome(received)) is not None:
        assert some
        found += some
    assert sorted(found) == list(range(5))
    MPI.Request.Waitall(sent)
    assert all_messages_arrived(buffers, before)


def check_test_and_testall(comm):
    buffers, received, sent, before = start_ring_messages(comm)
    while not MPI.Request.Testall(received):
        pass
    for request in sent:
        while not request.Test():
            pass
        assert request == MPI.REQUEST_NULL
    assert all_messages_arrived(buffers, before)
    while MPI.Request.Testany(sent) != (MPI.UNDEFINED, True):
        raise AssertionError("all requests are null, so Testany must not wait for one")


def check_status_of_active_requests(comm):
    request, status = comm.irecv(source=comm.rank, tag=3), MPI.Status()
    assert not request.Get_status()
    comm.send("late", comm.rank, 3)
    while not request.Get_status(status):
        pass
    assert (status.source, status.tag) == (comm.rank, 3)
    assert request, "the request must stay active until a wait or a test completes it"
    assert request.wait() == "late"


def check_cancelled_receives(comm):
    request = comm.Irecv(np.zeros(3), comm.rank, 77)
    status = MPI.Status()
    request.Cancel()
    request.Wait(status)
    assert status.Is_cancelled()
    assert not request


def check_persistent_messages(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    a, b = np.zeros(50), np.zeros(50)
    requests = [comm.Recv_init(b, before, 2), comm.Send_init(a, after, 2)]
    for step in range(4):
        a[:] = comm.rank * 10 + step
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        assert (b == before * 10 + step).all()
        assert all(requests), "persistent requests must stay usable"
    for request in requests:
        request.Free()
    assert not any(requests)


def check_persistent_collective(comm):
    a, b = np.zeros(4), np.zeros(4)
    request = comm.Allreduce_init(a, b, op=MPI.MAX)
    for step in range(3):
        a[:] = comm.rank + step
        request.Start()
        request.Wait()
        assert (b == comm.size - 1 + step).all()
    request.Free()


def check_generalized_request(comm):
    calls = []
    request = MPI.Grequest.Start(lambda status: status.Set_source(3), lambda: calls.append("freed"))
    assert not request.Test()
    request.Complete()
    status = MPI.Status()
    request.Wait(status)
    assert status.source == 3
    assert calls == ["freed"]


def check_sparse_exchange(comm):
    """Runs the NBX algorithm, in which a rank enters a barrier when its synchronous sends are complete. Regression test:
    before the fix, short synchronous sends did not wait for a receive, so ranks left the barrier before they had received all
    messages."""
    for form in range(20):
        targets = [to for to in range(comm.size) if (comm.rank * 7 + to * 5 + form) % 3]
        if form % 2:
            requests = [comm.Issend(np.full(1 + comm.rank, comm.rank), to, form) for to in targets]
        else:
            requests = [comm.issend(comm.rank, to, form) for to in targets]
        status, got, barrier = MPI.Status(), [], None
        while True:
            if comm.Iprobe(MPI.ANY_SOURCE, form, status):
                if form % 2:
                    buffer = np.zeros(1 + status.source, int)
                    comm.Recv(buffer, status.source, form)
                    assert (buffer == status.source).all()
                    got.append(status.source)
                else:
                    got.append(comm.recv(source=status.source, tag=form))
            elif barrier is None:
                if MPI.Request.Testall(requests):
                    barrier = comm.Ibarrier()
            elif barrier.Test():
                break
        assert sorted(got) == [rank for rank in range(comm.size) if (rank * 7 + comm.rank * 5 + form) % 3]


def check_synchronous_sends_wait_for_a_receive(comm):
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for count in (0, 1, 100_000):
        persistent = comm.Ssend_init(np.zeros(count), after, 3)
        persistent.Start()
        sent = [comm.Issend(np.zeros(count), after, 1), comm.issend(bytes(count), after, 2), persistent]
        for tag in (1, 2, 3):
            comm.Probe(before, tag)
        comm.Barrier()
        assert not any(request.Test() for request in sent)
        comm.Barrier()
        comm.Recv(np.zeros(count), before, 1)
        assert comm.recv(source=before, tag=2) == bytes(count)
        comm.Recv(np.zeros(count), before, 3)
        MPI.Request.Waitall(sent)
        received = [comm.Irecv(np.zeros(count), before, 4), comm.irecv(source=before, tag=5)]
        comm.Ssend(np.zeros(count), after, 4)
        comm.ssend(count, after, 5)
        assert MPI.Request.waitall(received) == [None, count]
