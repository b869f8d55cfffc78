/* One rank of an all-reduce benchmark with MPI; tools/compare/run compiles and starts it.
 *
 * Arguments: WARM_UP BYTES ITERATIONS [BYTES ITERATIONS ...]. Rank 0 prints one JSON object a line. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static float sample(size_t index, int rank) { return (float)((index + (size_t)rank) % 8191 % 64); }

static void reduce(float *buffer, int count) {
    MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

/* Elements that are wrong on all ranks after one more all-reduce. */
static unsigned long long check(float *buffer, int count, int rank, int ranks) {
    unsigned long long wrong = 0;
    for (int i = 0; i < count; i++) buffer[i] = sample((size_t)i, rank);
    reduce(buffer, count);
    for (int i = 0; i < count; i++) {
        float expected = 0;
        for (int r = 0; r < ranks; r++) expected += sample((size_t)i, r);
        wrong += buffer[i] != expected;
    }
    MPI_Allreduce(MPI_IN_PLACE, &wrong, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    return wrong;
}

static void measure(size_t bytes, int iterations, int warm_up, int rank, int ranks) {
    int count = (int)(bytes / sizeof(float));
    float *buffer = calloc((size_t)count, sizeof(float));
    double *times = calloc((size_t)iterations, sizeof(double));
    if (!buffer || !times) MPI_Abort(MPI_COMM_WORLD, 1);
    memset(buffer, 0, bytes);
    for (int i = 0; i < warm_up; i++) reduce(buffer, count);
    MPI_Barrier(MPI_COMM_WORLD);
    double last = MPI_Wtime();
    for (int i = 0; i < iterations; i++) {
        reduce(buffer, count);
        double now = MPI_Wtime();
        times[i] = (now - last) * 1e6;
        last = now;
    }
    /* The slowest rank's time counts. */
    MPI_Allreduce(MPI_IN_PLACE, times, iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    unsigned long long wrong = check(buffer, count, rank, ranks);
    qsort(times, (size_t)iterations, sizeof(double), ascending);
    double median = (times[(iterations - 1) / 2] + times[iterations / 2]) / 2;
    if (rank == 0) printf("{\"bytes\": %zu, \"time_us\": %.3f, \"wrong\": %llu}\n", bytes, median, wrong);
    fflush(stdout);
    free(buffer);
    free(times);
}

int main(int argc, char **argv) {
    int rank, ranks, length;
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    if (argc < 4 || argc % 2) {
        fprintf(stderr, "usage: mpi_bench WARM_UP BYTES ITERATIONS [BYTES ITERATIONS ...]\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    for (int i = 2; i < argc; i += 2)
        measure((size_t)atoll(argv[i]), atoi(argv[i + 1]), atoi(argv[1]), rank, ranks);
    MPI_Get_library_version(version, &length);
    version[strcspn(version, ",\n")] = 0;
    if (rank == 0) printf("{\"version\": \"%s\"}\n", version);
    MPI_Finalize();
    return 0;
}
