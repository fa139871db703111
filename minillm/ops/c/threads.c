/* The worker threads of threads.h.
 *
 * A job's pieces are divided among its threads: each has a share, a range of piece numbers. Its
 * owner takes pieces from the front, other threads from the back. A share is one 64-bit word,
 * changed with compare-and-swap, together with the number of its job. So a thread that was delayed
 * between reading a job and taking a piece fails if that job is over.
 *
 * A thread without work spins for a short time, because the next job of a step usually follows
 * within microseconds, and then sleeps, so that other programs get the core.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#endif
#include "threads.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MOST_THREADS 256
#define MOST_PIECES 65535        /* of a thread: they are numbered in 16 bits */
#define SPIN_NANOSECONDS 100000
#ifndef STARTING_NANOSECONDS      /* tests use less, so that small jobs are divided */
#define STARTING_NANOSECONDS 4000 /* another thread is worth this much work for each thread */
#endif
#define PIECE_NANOSECONDS 5000    /* most work of a piece, if an item is not more */
#define PIECES 8                  /* least number of pieces per thread */
#define STACK_BYTES (8 << 20)

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

/* A thread's share of the pieces: job number (32 bits), begin (16), end (16). In a cache line of its
 * own, like the sleeping state. */
typedef struct {
    _Alignas(64) _Atomic uint64_t range;
    _Alignas(64) _Atomic int asleep;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} member;

static struct {
    _Alignas(64) _Atomic uint32_t job;  /* number of the current job */
    _Alignas(64) _Atomic int64_t left;  /* pieces that are not done */
    _Atomic(piece_work) work;           /* the job; only written while `left` is 0 */
    _Atomic(void *) context;
    _Atomic int64_t count, piece, threads;
    member members[MOST_THREADS];       /* 0 is the caller */
    int64_t started;                    /* threads, with the caller; 0 before the first job */
} pool;

static pthread_mutex_t one_job = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int64_t wanted = 1;

static uint64_t share_of(uint32_t job, int64_t begin, int64_t end) {
    return (uint64_t)job << 32 | (uint64_t)begin << 16 | (uint64_t)end;
}

/* Take a piece of a share, or return -1 if there is none, or if the share is another job's. */
static int64_t take(member *m, uint32_t job, int front) {
    uint64_t word = atomic_load(&m->range);
    for (;;) {
        int64_t begin = (int64_t)(word >> 16 & 0xffff), end = (int64_t)(word & 0xffff);
        if (word >> 32 != job || begin >= end) return -1;
        uint64_t rest = front ? share_of(job, begin + 1, end) : share_of(job, begin, end - 1);
        if (atomic_compare_exchange_weak(&m->range, &word, rest)) return front ? begin : end - 1;
    }
}

static void wake_up(member *m) {
    if (!atomic_load(&m->asleep)) return;
    pthread_mutex_lock(&m->lock);
    pthread_cond_signal(&m->wake);
    pthread_mutex_unlock(&m->lock);
}

/* Process pieces of a job until none is left: first those of the thread's own share. The job is
 * read before a piece is taken, and cannot change until that piece is done. */
static void process(uint32_t job, int64_t thread) {
    int64_t threads = atomic_load(&pool.threads), count = atomic_load(&pool.count);
    int64_t size = atomic_load(&pool.piece);
    piece_work work = atomic_load(&pool.work);
    void *context = atomic_load(&pool.context);
    if (thread >= threads) return;
    int64_t pieces = (count + size - 1) / size;
    for (int64_t i = 0, piece; i < threads; i++) {
        int64_t owner = (thread + i) % threads, first = pieces * owner / threads;
        while ((piece = take(&pool.members[owner], job, i == 0)) >= 0) {
            int64_t begin = (first + piece) * size, end = begin + size;
            work(context, begin, end < count ? end : count, thread);
            if (atomic_fetch_sub(&pool.left, 1) == 1) wake_up(&pool.members[0]);
        }
    }
}

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Whether a member has something to do: the caller when its job is done, a worker when there is
 * another job than `seen`. */
static int ready(int64_t thread, uint32_t seen) {
    return thread ? atomic_load(&pool.job) != seen : atomic_load(&pool.left) == 0;
}

/* Wait until `ready`: spin, then sleep. */
static void wait_until_ready(int64_t thread, uint32_t seen) {
    int64_t end = nanoseconds() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (ready(thread, seen)) return;
            PAUSE();
        }
    } while (nanoseconds() < end);
    member *m = &pool.members[thread];
    pthread_mutex_lock(&m->lock);
    atomic_store(&m->asleep, 1); /* before `ready`: `wake_up` reads it after changing the pool */
    while (!ready(thread, seen)) pthread_cond_wait(&m->wake, &m->lock);
    atomic_store(&m->asleep, 0);
    pthread_mutex_unlock(&m->lock);
}

static void *worker(void *argument) {
    int64_t thread = (int64_t)(intptr_t)argument;
    for (uint32_t seen = 0;;) {
        wait_until_ready(thread, seen);
        seen = atomic_load(&pool.job);
        process(seen, thread);
    }
    return 0;
}

/* A forked child has none of the parent's threads: it starts its own with its first job. No job
 * runs during a fork. */
static void before_fork(void) { pthread_mutex_lock(&one_job); }
static void after_fork(void) { pthread_mutex_unlock(&one_job); }
static void after_fork_in_child(void) {
    memset(&pool, 0, sizeof pool);
    pthread_mutex_unlock(&one_job);
}

/* Start threads until there are `threads`, with all signals blocked: signals are the program's. */
static void start(int64_t threads) {
    static int registered;
    if (!registered) registered = !pthread_atfork(before_fork, after_fork, after_fork_in_child);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (int64_t i = pool.started; i < threads; i++) {
        member *m = &pool.members[i];
        pthread_mutex_init(&m->lock, 0);
        pthread_cond_init(&m->wake, 0);
        pthread_t id;
        if (i && pthread_create(&id, &attributes, worker, (void *)(intptr_t)i)) break;
#if defined(__linux__)
        if (i) pthread_setname_np(id, "minillm-worker"); /* for top -H and perf */
#endif
        pool.started = i + 1;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

/* Divide a job among threads, take part, and wait until it is done. */
static void run(int64_t count, int64_t piece, int64_t threads, piece_work work, void *context) {
    int64_t pieces = (count + piece - 1) / piece;
    uint32_t job = atomic_load(&pool.job) + 1;
    atomic_store(&pool.work, work);
    atomic_store(&pool.context, context);
    atomic_store(&pool.count, count);
    atomic_store(&pool.piece, piece);
    atomic_store(&pool.threads, threads);
    atomic_store(&pool.left, pieces);
    for (int64_t i = 0; i < threads; i++) {
        int64_t size = pieces * (i + 1) / threads - pieces * i / threads;
        atomic_store(&pool.members[i].range, share_of(job, 0, size));
    }
    atomic_store(&pool.job, job);
    for (int64_t i = 1; i < threads; i++) wake_up(&pool.members[i]);
    process(job, 0);
    wait_until_ready(0, job);
}

void run_job(int64_t count, int64_t piece, int64_t threads, piece_work work, void *context) {
    if (count <= 0) return;
    if (threads > num_threads()) threads = num_threads();
    int64_t most = threads * MOST_PIECES;
    if (piece < (count + most - 1) / most) piece = (count + most - 1) / most;
    int64_t pieces = (count + piece - 1) / piece;
    if (threads > pieces) threads = pieces;
    if (threads <= 1 || pthread_mutex_trylock(&one_job)) {
        work(context, 0, count, 0);
        return;
    }
    if (pool.started < threads) start(threads);
    if (pool.started < threads) threads = pool.started > 0 ? pool.started : 1;
    run(count, piece, threads, work, context);
    pthread_mutex_unlock(&one_job);
}

int64_t num_threads(void) { return atomic_load(&wanted); }

/* Set the number of threads; 1 to 256. */
void set_threads(int64_t threads) {
    atomic_store(&wanted, threads < 1 ? 1 : threads > MOST_THREADS ? MOST_THREADS : threads);
}

int64_t threads_for(int64_t nanoseconds) {
    int64_t worth = nanoseconds / STARTING_NANOSECONDS, most = num_threads();
    return worth < 1 ? 1 : worth < most ? worth : most;
}

int64_t piece_for(int64_t count, int64_t threads, int64_t nanoseconds) {
    int64_t most = count / (threads * PIECES), each = nanoseconds / (count > 0 ? count : 1);
    int64_t piece = PIECE_NANOSECONDS / (each > 0 ? each : 1);
    piece = piece < most ? piece : most;
    return piece > 1 ? piece : 1;
}

void divide_job(int64_t count, int64_t nanoseconds, piece_work work, void *context) {
    int64_t threads = threads_for(nanoseconds);
    run_job(count, piece_for(count, threads, nanoseconds), threads, work, context);
}
