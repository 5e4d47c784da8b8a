/* Shows a process a wall clock that somebody else steps; monotonic time is left alone.

   cc -shared -fPIC -o wall_clock.so wall_clock.c
   LD_PRELOAD=.../wall_clock.so WALL_CLOCK=<file of one int64: nanoseconds to add> program

   libfaketime 0.9.10 does not do: with it clock_nanosleep, Python's sleep, fails. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t SECOND_NS = 1000000000;
static volatile const int64_t *shift_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("WALL_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *page = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *shift_ns, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0) close(file);
    if (page == MAP_FAILED) abort(); /* a clock that is not stepped would prove nothing */
    *(void **)&real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    shift_ns = page;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real_clock_gettime) *(void **)&real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real_clock_gettime(clock, now);
    if (failed || !shift_ns || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    int64_t wall_ns = now->tv_sec * SECOND_NS + now->tv_nsec + *shift_ns;
    now->tv_sec = wall_ns / SECOND_NS;
    now->tv_nsec = wall_ns % SECOND_NS;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    (void)zone;
    struct timespec wall;
    int failed = clock_gettime(CLOCK_REALTIME, &wall);
    now->tv_sec = wall.tv_sec;
    now->tv_usec = wall.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *now) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    if (now) *now = wall.tv_sec;
    return wall.tv_sec;
}

/* Who waits until a time of the stepped clock has to wait by it: the kernel's own is not stepped. Wakes in
   between, as POSIX permits, so that a step reaches those who wait already. */
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    const time_t WALL_S = 1000000000; /* monotonic time, which others wait by, is never that late */
    const int64_t SLICE_NS = SECOND_NS / 20;
    if (until->tv_sec < WALL_S) return pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, until);
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    int64_t left_ns = (until->tv_sec - now.tv_sec) * SECOND_NS + until->tv_nsec - now.tv_nsec;
    if (left_ns <= 0) return ETIMEDOUT;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t end_ns = now.tv_sec * SECOND_NS + now.tv_nsec + (left_ns < SLICE_NS ? left_ns : SLICE_NS);
    struct timespec end = {end_ns / SECOND_NS, end_ns % SECOND_NS};
    int failed = pthread_cond_clockwait(condition, mutex, CLOCK_MONOTONIC, &end);
    return failed == ETIMEDOUT && left_ns > SLICE_NS ? 0 : failed;
}
