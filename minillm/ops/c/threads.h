/* Worker threads: a job is a number of items, which threads take in pieces.
 *
 * The threads are our own, and not OpenMP's: OpenMP waits at the end of a loop for every thread, so
 * one thread that another program keeps from its core delays all. Here a job is done when all its
 * pieces are done. A thread that does not run takes no pieces.
 */
#pragma once
#include <stdint.h>

/* Process items `begin` to `end` - 1. `thread` is below the job's number of threads, and no two
 * pieces with the same `thread` run at the same time, so it can index memory of its own. */
typedef void (*piece_work)(void *context, int64_t begin, int64_t end, int64_t thread);

/* Run a job: items 0 to `count` - 1, in pieces of `piece` items, on at most `threads` threads. Each
 * thread gets adjacent pieces, and takes from the others when it has none left. Pieces run in any
 * order. With one thread, or while another thread of the process runs a job, the caller processes
 * all items in one piece. */
void run_job(int64_t count, int64_t piece, int64_t threads, piece_work work, void *context);

/* The number of threads for jobs, including the caller. */
int64_t num_threads(void);

/* The number of threads for work that takes one thread about `nanoseconds`: starting another costs
 * a few microseconds. */
int64_t threads_for(int64_t nanoseconds);

/* Items of a piece for a job of `count` items that takes one thread about `nanoseconds`: small
 * enough that a delayed thread does not hold the others up, and several per thread. */
int64_t piece_for(int64_t count, int64_t threads, int64_t nanoseconds);

/* Run a job that takes one thread about `nanoseconds`, with `threads_for` and `piece_for`. */
void divide_job(int64_t count, int64_t nanoseconds, piece_work work, void *context);
