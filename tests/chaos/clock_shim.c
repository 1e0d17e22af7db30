/* A wall clock that can jump: LD_PRELOAD it, and let CLOCK_SHIM name a file with a double, the seconds to add. The clock
   that only goes forward is left alone, as the kernel leaves it when the time is set. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile double *offset;
static int (*next_clock)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_SHIM");
    next_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) offset = page;
    close(file);
}

int clock_gettime(clockid_t which, struct timespec *now) {
    if (!next_clock) next_clock = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = next_clock(which, now);
    if (status == 0 && offset && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) {
        double whole = floor(*offset);
        now->tv_sec += (time_t)whole;
        now->tv_nsec += (long)((*offset - whole) * 1e9);
        if (now->tv_nsec >= 1000000000L) { now->tv_nsec -= 1000000000L; now->tv_sec++; }
    }
    return status;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int status = clock_gettime(CLOCK_REALTIME, &precise);
    if (status == 0) { now->tv_sec = precise.tv_sec; now->tv_usec = precise.tv_nsec / 1000; }
    return status;
}

time_t time(time_t *into) {
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return (time_t)-1;
    if (into) *into = precise.tv_sec;
    return precise.tv_sec;
}
