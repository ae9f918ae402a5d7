/* The C kernels: what the parts agree on.
 *
 * Nothing here links against torch. Tensors come as raw pointers, threads are torch's own: the caller passes the
 * address of torch_parallel_for. Without fused multiply-add (-ffp-contract=off) every instruction set, and any
 * number of threads, gives the same bits.
 */
#ifndef CADAM_H
#define CADAM_H

#include <stdint.h>

/* Where the values of a kernel live. State and arithmetic are double for float64, float for the rest. */
enum dtype { F32, F64, BF16, F16, DTYPES };

enum { MAX_BUFFERS = 4, MAX_COEFFICIENTS = 32 };

/* Update n elements: parameter, gradient, buffers, coefficients. Returns how many were aligned. */
typedef int64_t update_fn(void *p, const void *g, void *const *s, int64_t n, const void *c);

/* One id of a row update. */
typedef struct {
    uint32_t row; /* within its bucket */
    uint32_t at;  /* position among the ids: which row of the gradients */
} entry;

/* The distinct rows of a bucket in order of appearance. A row that appears once has its gradient where it lies; of one
 * that appears again the sum is at `sums`, in the type of the arithmetic. */
typedef struct {
    uint32_t *slot;      /* by row: one more than its number among the distinct ones, or 0 */
    uint32_t *distinct;  /* by number: the row */
    const char **source; /* by number: its gradient or its sum */
    char *sums;          /* by number */
} found_rows;

/* The memory that the rows of a bucket are in: of the parameter, then of its buffers. */
typedef struct {
    int count;
    const char *first[1 + MAX_BUFFERS];
    int64_t bytes[1 + MAX_BUFFERS]; /* of one row */
} row_memory;

/* Find the distinct rows of n entries and sum their gradients of this width, fetching the rows' memory on the way.
 * Returns how many there are. */
typedef int64_t gather_fn(const entry *entries, int64_t n, const void *grads, int64_t width, const row_memory *rows,
                          found_rows *to);

typedef struct {
    const char *name;      /* as the generator wrote it: the rule and its buffers */
    int buffers, coefficients;
    update_fn *dense[DTYPES];   /* gradient in the parameter's type */
    update_fn *summed[DTYPES];  /* gradient in the type of the arithmetic, as row sums are */
} kernel;

typedef struct {
    const kernel *kernels;
    int count;
    update_fn *traffic; /* float32, two buffers: for benchmarks */
    gather_fn *gather[DTYPES];
} instruction_set;

/* Prefetch every line of some bytes, into the innermost cache or the next (3 or 2, a constant). */
#define fetch(p, bytes, cache)                                                                                     \
    do {                                                                                                           \
        const char *end_ = (const char *)(p) + (bytes);                                                            \
        for (const char *line_ = (const char *)((uintptr_t)(p) & ~(uintptr_t)63); line_ < end_; line_ += 64)       \
            __builtin_prefetch(line_, 0, cache);                                                                   \
    } while (0)

typedef void range_fn(int64_t begin, int64_t end, void *context);
typedef int32_t parallel_for_fn(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context);

#endif
