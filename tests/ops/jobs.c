/* Jobs for the worker threads of threads.c that notice mistakes, for test_c_threads.py. */
#include "threads.h"
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#define MOST_THREADS 16
#define PATIENCE 1.0 /* seconds that an item waits for others */

typedef struct {
    atomic_int *hits;              /* of each item */
    atomic_int busy[MOST_THREADS]; /* pieces that run with this `thread` now */
    atomic_int wrong;              /* pieces with a `thread` that is too large or already busy */
    int64_t threads;
} counted;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void pause_for(double seconds) {
    struct timespec t = {0, (long)(seconds * 1e9)};
    nanosleep(&t, 0);
}

static void enter(counted *c, int64_t thread) {
    if (thread < 0 || thread >= c->threads || c->busy[thread]++) c->wrong++;
}

static void count_items(void *context, int64_t begin, int64_t end, int64_t thread) {
    counted *c = context;
    enter(c, thread);
    for (int64_t i = begin; i < end; i++) c->hits[i]++;
    c->busy[thread]--;
}

/* Run a job; returns the number of items that were not processed exactly once, and of wrong
 * pieces. */
int64_t wrong_items(int64_t count, int64_t piece, int64_t threads) {
    counted *c = calloc(1, sizeof *c); /* not freed: after a mistake, a thread may still use it */
    c->hits = calloc((size_t)(count + piece), sizeof(atomic_int));
    c->threads = threads;
    run_job(count, piece, threads, count_items, c);
    int64_t wrong = c->wrong;
    for (int64_t i = 0; i < count + piece; i++) wrong += c->hits[i] != (i < count);
    return wrong;
}

/* The same for many jobs of random sizes, some after a pause in which threads fall asleep. */
int64_t wrong_in_random_jobs(int64_t seed, int64_t jobs, int64_t threads) {
    unsigned state = (unsigned)seed;
    int64_t wrong = 0;
    for (int64_t i = 0; i < jobs; i++) {
        int64_t count = rand_r(&state) % 300, piece = 1 + rand_r(&state) % 9;
        wrong += wrong_items(count, piece, 1 + rand_r(&state) % threads);
        if (rand_r(&state) % 50 == 0) pause_for(3e-4);
    }
    return wrong;
}

typedef struct {
    counted c;
    atomic_int done;
    int64_t count;
    double pause; /* of the other items */
} dependent;

/* Item 0 waits for all others, so the thread that has it is as one that does not run. */
static void wait_in_first(void *context, int64_t begin, int64_t end, int64_t thread) {
    dependent *d = context;
    enter(&d->c, thread);
    for (int64_t i = begin; i < end; i++) {
        double limit = now() + PATIENCE;
        while (i == 0 && d->done < d->count - 1 && now() < limit) pause_for(1e-5);
        if (i == 0 && d->done < d->count - 1) d->c.wrong++;
        if (d->pause > 0) pause_for(d->pause);
        d->done++;
    }
    d->c.busy[thread]--;
}

/* A job whose item 0 waits for all others. Returns 0 if another thread processed these. */
int64_t waits_in_first_item(int64_t count, int64_t threads, double pause) {
    dependent *d = calloc(1, sizeof *d);
    d->c.threads = threads, d->count = count, d->pause = pause;
    run_job(count, 1, threads, wait_in_first, d);
    return d->c.wrong + (d->done != count);
}

typedef struct {
    atomic_int begun, done;
} slow;

static void sleep_in_worker(void *context, int64_t begin, int64_t end, int64_t thread) {
    slow *s = context;
    double limit = now() + PATIENCE;
    while (!thread && !s->begun && now() < limit) pause_for(1e-5);
    s->begun = 1;
    if (thread) pause_for(5e-3); /* longer than the caller spins: it falls asleep */
    s->done += (int)(end - begin);
}

/* A job that a worker ends long after the caller has nothing to do. */
int64_t sleeps_until_done(void) {
    slow *s = calloc(1, sizeof *s);
    run_job(2, 1, 2, sleep_in_worker, s);
    return s->done != 2;
}

static void pause_in_each(void *context, int64_t begin, int64_t end, int64_t thread) {
    for (int64_t i = begin; i < end; i++) pause_for(1e-4);
    (void)context, (void)thread;
}

/* A short job, and at once another one, in which a thread may be late from the first. */
int64_t wrong_after_short_job(void) {
    run_job(4, 1, 2, pause_in_each, 0);
    return waits_in_first_item(50, 2, 0);
}
