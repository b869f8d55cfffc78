//! The text that `ringrun --help` prints after the options.

pub(super) const AFTER_OPTIONS: &str = "\
Examples:
  ringrun -n 4 ringtrain                    train a model on 4 ranks on this machine
  ringrun -n 4 ringbench allreduce          measure all-reduce between 4 ranks
  ringrun -n 2 -- python train.py --lr 0.1  run any program on 2 ranks
  ringrun -n 4 --output-dir logs ringtrain  also write the output of each rank N to logs/rank.N/stdout and stderr
  ringrun -n 2 -x RUST_LOG=debug ringtrain  set an environment variable for every rank
  ringrun --mpi4py -n 2 python script.py    run an mpi4py script on the Python package ringtrain

ringtrain and ringbench are built into ringrun. If COMMAND is ringtrain or ringbench, the built-in program runs. To run \
another program of that name, give its path, for example ./ringtrain.

Each rank finds its number and the number of ranks in the environment variables RING_RANK and RING_WORLD_SIZE, and in the \
variables that torchrun, Horovod and Open MPI set. The standard input of each rank is /dev/null. If there is more than one \
rank and you have not set OMP_NUM_THREADS, ringrun sets this variable to the number of cores for each rank.

ringrun divides the processors evenly among the ranks and binds each rank to its share (see --bind-to). It uses only \
processors that taskset, Slurm or the container allow. Each job claims the processors to which it binds ranks, and jobs that \
start later on the same host prefer unclaimed processors. If all processors are claimed, the jobs share them evenly.

ringrun prints a line of up to 16 MiB in one piece. It splits longer lines. On a terminal, ringrun shows the unfinished line \
of rank 0's standard error, for example a progress bar, below the lines of all ranks.

With --mpi4py, `from mpi4py import MPI` imports the Python package ringtrain. ringrun runs the interpreter once to ask the \
package for its mpi4py directory, and puts this directory first in the ranks' PYTHONPATH. The interpreter is COMMAND if \
its name begins with python or pypy, otherwise python3. With --mpi4py=installed, the same statement imports the installed \
mpi4py. Without --mpi4py, importing mpi4py on 2 or more ranks raises an ImportError, because with an installed MPI each \
rank would be a world of size 1. A program that catches the error can continue without mpi4py.

If a rank fails, the other ranks have the time of --grace to exit. ringrun then sends SIGTERM to the ranks that still run. \
If these ranks have not exited after the time of --kill-after, ringrun sends SIGKILL to them, and to all processes that the \
ranks have started. At the end, ringrun reports which rank failed first, how this rank failed, and the last lines of its \
output. When any rank ends, ringrun kills the processes that are left in the process group of this rank.

With --tolerate-failures, a rank that fails does not end the other ranks. A rank fails if it exits with a code other than 0, \
or if a signal kills it. ringrun prints each failure at once. At the end, ringrun prints one sentence about all failures. If \
a rank fails before all ranks have joined the job, ringrun ends the job, as it does without this option. So if the ranks never \
join the job, every failure ends the job. A rank joins the job when it creates its first group.

ringrun passes these signals on to the ranks:
  SIGINT (Ctrl-C), SIGHUP, SIGQUIT              the job ends within --kill-after; a second Ctrl-C ends the job at once
  SIGTERM                                       ranks have --term-timeout to save and exit; if all exit with 0, ringrun does too
  SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH  no other effect
If ringrun itself is killed, its ranks are killed too. If the program that reads the standard output of ringrun exits, \
ringrun stops the job, unless --output-dir is given.

Exit codes:
  0        every rank exited with 0; with --tolerate-failures, at least one rank exited with 0
  1-255    the code of the rank that failed first; 128+N if signal N killed it
  1        also: standard output or a file of --output-dir could not be written
  2        wrong usage: unknown option, bad value or bad combination
  3        --wdir or --output-dir cannot be used, or the limit on open files is too low
  5        the ranks could not be started, or --mpi4py did not find the Python package
  124      the job took longer than --job-timeout
  126      COMMAND cannot be executed
  127      COMMAND was not found
  129-143  a signal ended the job: 130 for Ctrl-C, 143 for SIGTERM; 141 if the reader of standard output exited
";
