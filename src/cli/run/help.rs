//! The text that `ringrun --help` prints after the options.

pub(super) const AFTER_OPTIONS: &str = "\
Examples:
  ringrun -n 4 ringtrain                    train a model on 4 ranks on this machine
  ringrun -n 4 ringbench allreduce          measure all-reduce between 4 ranks
  ringrun -n 2 -- python train.py --lr 0.1  run any program on 2 ranks
  ringrun -n 4 --output-dir logs ringtrain  also write the output of each rank to files in logs
  ringrun -n 2 -x RUST_LOG=debug ringtrain  set RUST_LOG to debug for every rank
  ringrun --mpi4py -n 2 python script.py    run an mpi4py script with ringtrain instead of MPI
  ringrun -H a:2,b:2 ringtrain              train on 2 ranks on each of the hosts a and b
  ringrun -n 1 ./reader : -n 3 ./trainer    run several programs as the ranks of one job
  ringrun -H a,b --port 7000-7001 --print-firewall
                                            print the rules that the firewalls of a and b need
  ringrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint node0:29400 ringtrain
                                            the same command on each of 2 nodes, without ssh
  ringrun doctor -H a,b                     measure the network between hosts; see ringrun doctor --help
  ringrun top                               show the progress of runs with --metrics; see ringrun top --help
  zcat a.csv.gz | ringrun -n 4 ringtrain --data - --target y
                                            train on a table that another program writes

The programs ringtrain and ringbench are built into ringrun. To run another program with one of these names, give its path, \
for example ./ringtrain.

The environment variable RING_RANK holds the number of the rank, and RING_WORLD_SIZE holds the number of ranks. ringrun also \
sets the variables of torchrun, Horovod and Open MPI, such as LOCAL_RANK. In jobs of 2 or more ranks, ringrun sets \
OMP_NUM_THREADS to the number of cores for each rank, unless you have set this variable.

ringrun starts the ranks of other hosts (see --host) through ssh, without a password: `ssh -o BatchMode=yes HOST true` must \
work. Each host needs the same version of ringrun, and the program, the data and the working directory at the same paths. \
The ranks get the variables of -x and your variables whose names begin with RING_. If the connection to a host breaks, \
ringrun stops the job on all hosts, and the lost host stops its own ranks. With more than --ssh-fanout hosts, the first hosts \
run ssh to further hosts, with the same options.

Rank 0 reads the standard input of ringrun if this is a pipe, a file or a socket. If the standard input of ringrun is a \
terminal, and on all other ranks, the standard input is /dev/null (see --stdin). In a shell loop such as \
`while read line; do ringrun ...; done`, pass --stdin none, so that rank 0 does not read the lines of the loop.

ringrun divides the processors evenly among the ranks and binds each rank to its share (see --bind-to). ringrun uses only \
the processors that taskset, Slurm or the container allows. Each job claims its processors. A job that starts later on the \
same host prefers unclaimed processors. If all processors are claimed, the jobs share them evenly.

ringrun prints each line in one piece. ringrun splits a line only if the line has more than 16 MiB, or if the unfinished \
lines of all ranks together have more than 256 MiB. On a terminal, the progress bar of rank 0 stays below all other lines. \
The progress bar is the unfinished line on the standard error of rank 0. To change this line, a program writes a carriage \
return and the new text.

With --mpi4py, `from mpi4py import MPI` imports the Python package ringtrain. To find the directory of this package, ringrun \
runs an interpreter once: COMMAND if its name begins with python or pypy, otherwise python3. ringrun puts the directory \
first in the PYTHONPATH of the ranks. With --mpi4py=installed, `from mpi4py import MPI` imports the installed mpi4py. Without \
--mpi4py, importing mpi4py in a job of 2 or more ranks raises an ImportError, because an installed MPI would give each rank a \
world of size 1. A program that catches the ImportError can continue without mpi4py.

If a rank fails, ringrun waits for --grace, and then sends SIGTERM to the ranks that still run. ringrun then waits for \
--kill-after, and sends SIGKILL to the remaining ranks and to all processes that the ranks have started. At the end, ringrun \
names the rank that failed first, says how it failed, and prints the last lines of its output. When a rank ends, ringrun kills \
the processes that remain in the process group of this rank.

With --tolerate-failures, the other ranks continue when a rank fails. A rank fails if it exits with a code other than 0, or if \
a signal kills it. ringrun prints each failure immediately, and prints a summary of all failures at the end. Until all ranks \
have joined the job, a failure still ends the job. A rank joins the job when it creates its first group.

ringrun passes these signals on to the ranks:
  SIGINT (Ctrl-C), SIGHUP, SIGQUIT              ringrun kills the remaining ranks after
                                                --kill-after, or at a second Ctrl-C
  SIGTERM                                       ringrun kills the remaining ranks after
                                                --term-timeout
  SIGUSR1, SIGUSR2, SIGCONT, SIGTSTP, SIGWINCH  ringrun only passes the signal on

If ringrun itself is killed, its ranks are killed too. If the reader of ringrun's standard output exits, as head does in \
`ringrun ... | head`, ringrun stops the job. With --output-dir, ringrun does not stop the job.

Exit codes:
  0        every rank exited with 0; with --tolerate-failures, at least one rank exited with 0
  1-255    the exit code of the rank that failed first, or 128+N if signal N killed this rank
  1        also: ringrun could not write to its standard output or to a file in --output-dir
  2        also: an option is unknown or has a wrong value, or two options exclude each other
  3        also: the directory of --wdir or --output-dir cannot be used, or the limit on open files
           is too low
  5        also: the ranks could not be started, a host could not be reached, or --mpi4py did not find the
           Python package ringtrain
  6        also: the connection to a host broke
  11       also: other programs use the ports of --port
  13       also: a host has another version of ringrun
  124      the job took longer than --job-timeout
  126      COMMAND cannot be executed
  127      COMMAND was not found
  129      ringrun got SIGHUP
  130      ringrun got SIGINT (Ctrl-C)
  131      ringrun got SIGQUIT
  141      the reader of ringrun's standard output exited
  143      ringrun got SIGTERM, and not all ranks exited with 0
";
