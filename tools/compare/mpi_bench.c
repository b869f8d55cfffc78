/* One rank of a benchmark of collectives with MPI; peers.py compiles and starts it.
 *
 * Arguments: OPERATION DTYPE WARM_UP INPUT [BYTES ITERATIONS ...]. NAMES lists the operations, and DTYPE is f32 or f64. BYTES is
 * the size of the whole buffer, as in ringbench. Rank 0 prints a JSON object on each line: first the library's version, and
 * then the results of each size as soon as it is measured. The time of a ping_pong is half of the round trip. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum operation {
    ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, REDUCE, BARRIER, GATHER, SCATTER, ALL_TO_ALL, PING_PONG, SEND_RECEIVE, OPERATIONS
};
static const char *const NAMES[OPERATIONS] = {"all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce", "barrier",
                                              "gather", "scatter", "all_to_all", "ping_pong", "send_receive"};

static enum operation operation;
static MPI_Datatype type;
static int wide, rewrites_input, rank, ranks;

static size_t width(void) { return wide ? sizeof(double) : sizeof(float); }
static double get(const void *buffer, int i) { return wide ? ((const double *)buffer)[i] : ((const float *)buffer)[i]; }
static void put(void *buffer, int i, double value) {
    if (wide) ((double *)buffer)[i] = value;
    else ((float *)buffer)[i] = (float)value;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Returns the processor time of this process, with all its threads. */
static double processor_time_s(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (double)(use.ru_utime.tv_sec + use.ru_stime.tv_sec) + 1e-6 * (double)(use.ru_utime.tv_usec + use.ru_stime.tv_usec);
}

/* Returns a monotonic time in microseconds. All MPIs use this clock, because the cost of MPI_Wtime differs among them. */
static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e6 * (double)now.tv_sec + 1e-3 * (double)now.tv_nsec;
}

/* Whether the operation divides the buffer into equal parts, one for each rank. */
static int has_parts(void) {
    return operation == ALL_GATHER || operation == REDUCE_SCATTER || operation == GATHER || operation == SCATTER
        || operation == ALL_TO_ALL;
}

/* Whether the result is in the second buffer. */
static int has_output(void) { return operation >= GATHER; }

/* Rank 0 sends the buffer to rank 1, and rank 1 then sends its buffer to rank 0. */
static void ping_pong(const void *buffer, void *output, int count) {
    if (rank == 0) MPI_Send(buffer, count, type, 1, 0, MPI_COMM_WORLD);
    if (rank < 2) MPI_Recv(output, count, type, 1 - rank, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    if (rank == 1) MPI_Send(buffer, count, type, 0, 0, MPI_COMM_WORLD);
}

static void perform(void *buffer, void *output, int count) {
    int part = count / ranks, next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
    switch (operation) {
    case ALL_REDUCE: MPI_Allreduce(MPI_IN_PLACE, buffer, count, type, MPI_SUM, MPI_COMM_WORLD); break;
    case BROADCAST: MPI_Bcast(buffer, count, type, 0, MPI_COMM_WORLD); break;
    case ALL_GATHER: MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, buffer, part, type, MPI_COMM_WORLD); break;
    case REDUCE: MPI_Reduce(rank ? buffer : MPI_IN_PLACE, rank ? NULL : buffer, count, type, MPI_SUM, 0, MPI_COMM_WORLD); break;
    case BARRIER: MPI_Barrier(MPI_COMM_WORLD); break;
    case GATHER: MPI_Gather(buffer, part, type, output, part, type, 0, MPI_COMM_WORLD); break;
    case SCATTER: MPI_Scatter(buffer, part, type, output, part, type, 0, MPI_COMM_WORLD); break;
    case ALL_TO_ALL: MPI_Alltoall(buffer, part, type, output, part, type, MPI_COMM_WORLD); break;
    case PING_PONG: ping_pong(buffer, output, count); break;
    case SEND_RECEIVE:
        MPI_Sendrecv(buffer, count, type, next, 0, output, count, type, previous, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        break;
    /* With MPI_IN_PLACE, the rank's part of the result is at the start of the buffer. */
    default: MPI_Reduce_scatter_block(MPI_IN_PLACE, buffer, part, type, MPI_SUM, MPI_COMM_WORLD);
    }
}

static double sample(int index, int from) { return (double)(((size_t)index + (size_t)from) % 8191 % 64); }

static double total(int index) {
    double sum = 0;
    for (int from = 0; from < ranks; from++) sum += sample(index, from);
    return sum;
}

/* Returns the right value of the element at this index after the operation. */
static double expected(int index, int part) {
    switch (operation) {
    case ALL_REDUCE: case REDUCE: return total(index);
    case BROADCAST: return sample(index, 0);
    case ALL_GATHER: return sample(index, index / part);
    /* The first element of a part has the index 0 on its sender in a gather. */
    case GATHER: return sample(index % part, index / part);
    case SCATTER: return sample(rank * part + index, 0);
    case ALL_TO_ALL: return sample(rank * part + index % part, index / part);
    case PING_PONG: return sample(index, 1 - rank);
    case SEND_RECEIVE: return sample(index, (rank + ranks - 1) % ranks);
    default: return total(rank * part + index);
    }
}

/* Returns the number of elements of the result on this rank. */
static int result_count(int count) {
    switch (operation) {
    case REDUCE_SCATTER: case SCATTER: return count / ranks;
    case REDUCE: case GATHER: return rank == 0 ? count : 0;
    case BARRIER: return 0;
    case PING_PONG: return rank < 2 ? count : 0;
    default: return count;
    }
}

/* Runs one more operation, and returns the number of wrong elements on all ranks together. */
static unsigned long long check(void *buffer, void *output, int count) {
    unsigned long long wrong = 0;
    int part = count / ranks;
    for (int i = 0; i < count; i++) {
        /* Before the operation, the elements that it must write have a wrong value (-1). */
        int given = operation == BROADCAST ? rank == 0 : operation != ALL_GATHER || i / part == rank;
        put(buffer, i, given ? sample(i, rank) : -1);
        if (output) put(output, i, -1);
    }
    perform(buffer, output, count);
    const void *found = output ? output : buffer;
    for (int i = 0; i < result_count(count); i++) wrong += get(found, i) != expected(i, part);
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    return wrong;
}

/* Writes to every cache line of the contribution of this rank. Afterwards, no other processor has the line in its cache. */
static void rewrite_input(void *buffer, int count) {
    if (operation == GATHER) count /= ranks;
    if (operation == BARRIER || (operation == SCATTER && rank != 0)) count = 0;
    for (size_t i = 0; i < (size_t)count * width(); i += 64) ((volatile char *)buffer)[i] = 0;
}

static void measure(size_t bytes, int iterations, int warm_up) {
    int count = (int)(bytes / width());
    if (has_parts()) count -= count % ranks;
    void *buffer = calloc((size_t)count, width());
    void *output = has_output() ? calloc((size_t)count, width()) : NULL;
    double *times = calloc((size_t)iterations, sizeof(double));
    if (!buffer || !times || (has_output() && !output)) MPI_Abort(MPI_COMM_WORLD, 1);
    memset(buffer, 0, (size_t)count * width());
    if (output) memset(output, 0, (size_t)count * width());
    for (int i = 0; i < warm_up; i++) perform(buffer, output, count);
    MPI_Barrier(MPI_COMM_WORLD);
    double mean = 0, used = processor_time_s(), last = now_us();
    for (int i = 0; i < iterations; i++) {
        if (rewrites_input) {
            rewrite_input(buffer, count);
            last = now_us();
        }
        perform(buffer, output, count);
        double now = now_us();
        times[i] = now - last;
        /* As in ringbench, the time of a ping_pong is half of the round trip, by the clock of rank 0. */
        if (operation == PING_PONG) times[i] *= rank == 0 ? 0.5 : 0;
        mean += times[i] / iterations;
        last = now;
    }
    used = processor_time_s() - used;
    MPI_Allreduce(MPI_IN_PLACE, &used, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    /* The time of an iteration is that of its slowest rank. The mean is that of the slowest rank. */
    MPI_Allreduce(MPI_IN_PLACE, &mean, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    MPI_Allreduce(MPI_IN_PLACE, times, iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    unsigned long long wrong = check(buffer, output, count);
    qsort(times, (size_t)iterations, sizeof(double), ascending);
    double median = (times[(iterations - 1) / 2] + times[iterations / 2]) / 2;
    if (rank == 0)
        printf("{\"bytes\": %zu, \"iterations\": %d, \"time_us_median\": %.3f, \"time_us_mean\": %.3f, \"wrong\": %llu, "
               "\"cpu_s\": %.6f}\n", bytes, iterations, median, mean, wrong, used);
    fflush(stdout);
    free(buffer);
    free(output);
    free(times);
}

int main(int argc, char **argv) {
    int length, known = 0;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    while (argc >= 4 && known < OPERATIONS && strcmp(argv[1], NAMES[known])) known++;
    if (argc < 5 || argc % 2 == 0 || known == OPERATIONS || (strcmp(argv[2], "f32") && strcmp(argv[2], "f64"))
        || (strcmp(argv[4], "rewritten") && strcmp(argv[4], "unchanged"))) {
        fprintf(stderr, "usage: mpi_bench OPERATION f32|f64 WARM_UP rewritten|unchanged [BYTES ITERATIONS ...]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    operation = (enum operation)known;
    wide = !strcmp(argv[2], "f64");
    rewrites_input = !strcmp(argv[4], "rewritten");
    type = wide ? MPI_DOUBLE : MPI_FLOAT;
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n\"\\")] = 0;
    if (rank == 0) printf("{\"version\": \"%s\"}\n", version);
    fflush(stdout);
    for (int i = 5; i < argc; i += 2) measure((size_t)atoll(argv[i]), atoi(argv[i + 1]), atoi(argv[3]));
    MPI_Finalize();
    return 0;
}
