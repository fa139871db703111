/* All-reduce (sum) and all-gather of ranks in shared memory. Ranks are processes or threads.
 *
 *   group | slot of rank 0 | slot of rank 1 | .. | parts, even calls | parts, odd calls
 *                                                  rank 0 | rank 1 ..  rank 0 | rank 1 ..
 *
 * A rank writes its part, then the number of its current call to its slot, and waits until all
 * slots have that number. Then all parts are complete, and each rank adds them in the same tree
 * (communicator.py), so that all ranks get the same bits. A part is overwritten two calls later. By
 * then all ranks have begun the call in between, and so have read it.
 *
 * Data larger than `room` is sent in pieces, each as a call of its own.
 */
#include "common.h"
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

#define LINE 128       /* bytes: CPUs fetch cache lines of 64 in pairs */
#define SPINS 2000     /* busy-wait iterations before yielding: 20 to 100 us */
#define YIELDING 0.002 /* seconds of yielding before sleeping */
#define SLEEP 50000    /* nanoseconds */
#define BLOCK 1024     /* elements added at a time: the sums stay in the L1 cache */
#define LEVELS 16      /* of the tree of ranks */

enum { DONE, LATE, ABORTED, UNEQUAL }; /* as in shared_memory.py */
enum { SUM = 1, GATHER };

typedef struct {
    int64_t size, room; /* ranks; bytes of a part, a multiple of LINE */
    _Alignas(LINE) atomic_int aborted;
} group;

typedef struct {
    _Alignas(LINE) _Atomic uint64_t calls; /* number of calls that this rank has begun */
    int64_t brought[2];                    /* size and kind of its last two calls */
} slot;

static slot *slot_of(group *g, int64_t rank) { return (slot *)(g + 1) + rank; }

static char *part_of(group *g, uint64_t call, int64_t rank) {
    return (char *)slot_of(g, g->size) + ((call & 1) * g->size + rank) * g->room;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Wait until a rank has begun a call: busy-wait, then yield, then sleep, because there may be more
 * ranks than cores. */
static int wait_for(group *g, int64_t rank, uint64_t call, double patience) {
    slot *other = slot_of(g, rank);
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&other->calls, memory_order_acquire) >= call) return DONE;
        relax();
    }
    double begin = now();
    while (atomic_load_explicit(&other->calls, memory_order_acquire) < call) {
        if (atomic_load(&g->aborted)) return ABORTED;
        double waited = now() - begin;
        if (waited > patience) return LATE;
        if (waited < YIELDING) sched_yield();
        else nanosleep(&(struct timespec){.tv_nsec = SLEEP}, NULL);
    }
    return DONE;
}

/* Publish a piece of a part, and wait for the pieces of the other ranks. `report`: 1 for each late
 * rank, if any is late; size and kind of each rank's part, if they differ. */
static int exchange(group *g, int64_t rank, uint64_t call, const char *piece, int64_t bytes,
                int64_t brought, double patience, int64_t *report) {
    slot *own = slot_of(g, rank);
    if (atomic_load(&g->aborted)) return ABORTED;
    memcpy(part_of(g, call, rank), piece, bytes);
    own->brought[call & 1] = brought;
    atomic_store_explicit(&own->calls, call, memory_order_release);
    int found = DONE, unequal = 0;
    for (int64_t r = 0; r < g->size && found == DONE; r++) found = wait_for(g, r, call, patience);
    for (int64_t r = 0; r < g->size; r++) {
        report[r] = found == DONE ? slot_of(g, r)->brought[call & 1]
                                  : atomic_load(&slot_of(g, r)->calls) < call;
        unequal |= found == DONE && report[r] != brought;
    }
    return unequal ? UNEQUAL : found;
}

/* Add the pieces of all ranks in float32 as a balanced tree, and round once. If the number of ranks
 * is not a power of 2, the remaining subtrees are added from the smallest on. */
static void add_up(group *g, uint64_t call, element *out, int64_t count) {
    float sums[LEVELS][BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        int64_t n = count - begin < BLOCK ? count - begin : BLOCK, top = -1;
        for (int64_t r = 0; r < g->size; r++) {
            const element *part = (const element *)part_of(g, call, r) + begin;
            if (r & 1) {
                for (int64_t i = 0; i < n; i++) sums[top][i] += load(part[i]);
            } else {
                top++;
                for (int64_t i = 0; i < n; i++) sums[top][i] = load(part[i]);
            }
            int last = r == g->size - 1; /* then join all remaining subtrees */
            for (int64_t ranks = r; last ? top > 0 : (r & 1) && (ranks & 2); ranks >>= 1) {
                top--;
                for (int64_t i = 0; i < n; i++) sums[top][i] += sums[top + 1][i];
            }
        }
        for (int64_t i = 0; i < n; i++) out[begin + i] = store(sums[0][i]);
    }
}

/* Replace part [count] by the sum over all ranks. */
int64_t shared_sum(void *memory, int64_t rank, element *part, int64_t count, double patience,
                   int64_t *report) {
    group *g = memory;
    uint64_t call = atomic_load(&slot_of(g, rank)->calls);
    int64_t most = g->room / (int64_t)sizeof(element), done = 0;
    int64_t brought = count * (int64_t)sizeof(element) * 4 + SUM;
    do {
        int64_t n = count - done < most ? count - done : most;
        int found = exchange(g, rank, ++call, (char *)(part + done), n * sizeof(element), brought,
                             patience, report);
        if (found != DONE) return found;
        add_up(g, call, part + done, n);
        done += n;
    } while (done < count);
    return DONE;
}

/* Gather part [bytes] of all ranks -> out [size, bytes]. */
int64_t shared_gather(void *memory, int64_t rank, const char *part, int64_t bytes, char *out,
                      double patience, int64_t *report) {
    group *g = memory;
    uint64_t call = atomic_load(&slot_of(g, rank)->calls);
    int64_t done = 0;
    do {
        int64_t n = bytes - done < g->room ? bytes - done : g->room;
        int found = exchange(g, rank, ++call, part + done, n, bytes * 4 + GATHER, patience, report);
        if (found != DONE) return found;
        for (int64_t r = 0; r < g->size; r++)
            memcpy(out + r * bytes + done, part_of(g, call, r), n);
        done += n;
    } while (done < bytes);
    return DONE;
}

/* Abort all waiting and future calls. */
void shared_abort(void *memory) { atomic_store(&((group *)memory)->aborted, 1); }

/* Bytes of memory for a group. The caller sets size and room; all other bytes must be 0. */
int64_t shared_bytes(int64_t size, int64_t room) {
    return (int64_t)(sizeof(group) + size * sizeof(slot)) + 2 * size * room;
}
