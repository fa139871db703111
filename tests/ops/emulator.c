/* Calls the C functions of the library in this process, for a test in another one (emulated.py).
 *
 * Linked with the sources of minillm/ops/c for another processor, with jobs.c, and run under qemu. For each call
 * it reads the function's name, its arguments, and all memory that they point to from stdin, and
 * writes the function's result and that memory to stdout. Numbers are 64 bits wide:
 *
 *   name [32 bytes]
 *   number of regions; of each: its address in the test, its size, whether it has addresses; bytes
 *   number of integers; of each: whether it is an address, and its value
 *   number of floats; of each: the contents of its register
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_INTEGERS 24
#define MOST_FLOATS 4
#define ALIGNMENT 64

/* In the calling conventions of AArch64 and x86-64, integers and floats have registers of their own,
 * and only integers are passed on the stack. So one type of call fits all functions. */
typedef int64_t call(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                     double, double, double, double);

#define EACH(X)                                                                                   \
    X(rms_norm) X(add_rms_norm) X(silu_mul) X(norm_rope_write) X(norm_rope_write_int8)            \
    X(decode_attention) X(decode_queries) X(prefill_attention) X(int8_attention) X(pack_panels)   \
    X(panel_product) X(panel_sums) X(panel_rows) X(quantized_product) X(panel_unit)               \
    X(choose_tokens) X(describe_tokens) X(draw_from_shard)                                        \
    X(run_layers) X(chosen_experts) X(expert_memory) X(latent_memory) X(head_linear) X(cos_sin)   \
    X(shared_sum) X(shared_gather) X(shared_abort) X(shared_bytes) X(set_threads) X(num_threads)  \
    X(wrong_in_random_jobs) X(wrong_after_short_job) X(sleeps_until_done)
#define DECLARE(name) call name;
EACH(DECLARE)

static const struct {
    const char *name;
    call *function;
} functions[] = {
#define ENTRY(name) {#name, name},
    EACH(ENTRY)
};

/* Memory of the test: its address there, and a copy here at the same offset from a cache line. */
typedef struct {
    int64_t address, size, has_addresses;
    char *allocated, *copy;
} region;

static void receive(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0); /* the test is over */
}

static int64_t receive_number(void) {
    int64_t number;
    receive(&number, sizeof number);
    return number;
}

static void receive_region(region *r) {
    r->address = receive_number(), r->size = receive_number(), r->has_addresses = receive_number();
    r->allocated = aligned_alloc(ALIGNMENT, ((size_t)r->size / ALIGNMENT + 2) * ALIGNMENT);
    if (!r->allocated) exit(1);
    r->copy = r->allocated + r->address % ALIGNMENT;
    receive(r->copy, (size_t)r->size);
}

/* The address here of an address in the test; other numbers, such as NULL, stay what they are. */
static int64_t translated(int64_t value, const region *regions, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (value >= regions[i].address && value < regions[i].address + regions[i].size)
            return (int64_t)(intptr_t)(regions[i].copy + (value - regions[i].address));
    return value;
}

static void translate_contents(region *r, const region *regions, int64_t count) {
    for (int64_t at = 0; at + 8 <= r->size; at += 8) {
        int64_t value;
        memcpy(&value, r->copy + at, sizeof value);
        value = translated(value, regions, count);
        memcpy(r->copy + at, &value, sizeof value);
    }
}

static call *function_of(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++)
        if (!strcmp(functions[i].name, name)) return functions[i].function;
    fprintf(stderr, "there is no function %s\n", name);
    exit(1);
}

static int64_t run(call *f, const int64_t *i, const double *d) {
    return f(i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13],
             i[14], i[15], i[16], i[17], i[18], i[19], i[20], i[21], i[22], i[23], d[0], d[1], d[2],
             d[3]);
}

static void answer(const char *name) {
    int64_t count = receive_number(), integers[MOST_INTEGERS] = {0};
    double floats[MOST_FLOATS] = {0};
    region *regions = calloc((size_t)count + 1, sizeof *regions);
    if (!regions) exit(1);
    for (int64_t r = 0; r < count; r++) receive_region(&regions[r]);
    for (int64_t r = 0; r < count; r++)
        if (regions[r].has_addresses) translate_contents(&regions[r], regions, count);
    int64_t num_integers = receive_number();
    for (int64_t i = 0; i < num_integers && i < MOST_INTEGERS; i++) {
        int64_t is_address = receive_number(), value = receive_number();
        integers[i] = is_address ? translated(value, regions, count) : value;
    }
    int64_t num_floats = receive_number();
    for (int64_t i = 0; i < num_floats && i < MOST_FLOATS; i++) receive(&floats[i], 8);
    int64_t result = run(function_of(name), integers, floats);
    fwrite(&result, sizeof result, 1, stdout);
    for (int64_t r = 0; r < count; r++) {
        fwrite(regions[r].copy, 1, (size_t)regions[r].size, stdout);
        free(regions[r].allocated);
    }
    free(regions);
    fflush(stdout);
}

int main(void) {
    for (;;) {
        char name[32];
        receive(name, sizeof name);
        answer(name);
    }
}
