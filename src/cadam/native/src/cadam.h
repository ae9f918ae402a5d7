/* The C kernels: what the parts agree on.
 *
 * Nothing here links against torch. Tensors come as raw pointers, threads are torch's own: the caller passes the
 * address of torch_parallel_for. Without fused multiply-add (-ffp-contract=off) every instruction set, and any
 * number of threads, gives the same bits.
 */
#ifndef CADAM_H
#define CADAM_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Where the values of a kernel live. State and arithmetic are double for float64, float for the rest. */
enum dtype { F32, F64, BF16, F16, DTYPES };

enum { MAX_BUFFERS = 4, MAX_COEFFICIENTS = 32 };

/* How moments are stored, see cadam/rules/moment_storage.py. Coded ones are at most two, and not those of float64 parameters. */
enum moments { PLAIN, CODED_BF16, CODED_INT8, STORAGES };

enum { MAX_CODED = 2, CODED_BLOCK = 256, WIDEST = 1024 }; /* elements that share a scale, or a row may have */

/* Numbers of half precision as float32, and back. */
typedef void open_fn(const uint16_t *from, float *to, int64_t n);
typedef void close_fn(uint16_t *to, const float *from, int64_t n);

/* Update n elements whose moments are coded: `scales` are those of the buffers, `place` is that of the first element,
 * `key` what the noise of this step comes from. Returns how many were aligned. */
typedef int64_t coded_fn(float *p, const float *g, void *const *s, uint8_t *const *scales, int64_t n, uint64_t place,
                         uint32_t key, const void *c);

/* Update n elements: parameter, gradient, buffers, coefficients. Returns how many were aligned. */
typedef int64_t update_fn(void *p, const void *g, void *const *s, int64_t n, const void *c);

/* One id of a row update. */
typedef struct {
    uint32_t row; /* within its bucket */
    uint32_t at;  /* position among the ids: which row of the gradients */
} entry;

/* The distinct rows of a bucket, in order of appearance, and what is to be done to them. The gradients of row r are
 * those at at[ends[r - 1]] to at[ends[r] - 1], in order of appearance; those of row 0 begin at at[0]. */
typedef struct {
    int64_t count, width, dtype, grad_dtype; /* the latter that of the table, or float32 where that has half precision */
    const uint32_t *distinct; /* the rows, within the bucket */
    const uint32_t *ends, *at;
    const void *grads;      /* of all ids */
    void *p, *s[MAX_BUFFERS]; /* the first row of the bucket: of the parameter, of its buffers */
    uint8_t *scales[MAX_CODED]; /* the same of coded buffers */
    uint64_t place;           /* the place of its first element in the table */
    uint32_t key;             /* what the noise of this step comes from */
    int32_t *steps;           /* where rows count their own steps: of the first row, else 0 */
    const int32_t *set_of;    /* by such a count: which set of coefficients */
    int64_t set_size;         /* of a set, in bytes */
} row_batch;

/* Sum the gradients of each row and update it, with these coefficients. Returns how many elements were aligned. */
typedef int64_t rows_fn(const row_batch *rows, const void *c);

/* Sum the gradients of each row. Returns the sum of the squares of these sums. */
typedef double squares_fn(const row_batch *rows);

typedef struct {
    const char *name;      /* as the generator wrote it: the rule and its buffers */
    int buffers, coefficients;
    update_fn *dense[DTYPES];
    update_fn *moments; /* float32, and the buffers alone: whatever the parameter is, it is neither read nor written */
    rows_fn *rows[DTYPES];
    rows_fn *mixed_rows[DTYPES]; /* of half precision, with gradients in float32 */
    coded_fn *coded[STORAGES]; /* or 0 */
    rows_fn *coded_rows[STORAGES];
    rows_fn *by_row[STORAGES]; /* where second moments are those of rows */
} kernel;

typedef struct {
    const kernel *kernels;
    int count;
    squares_fn *squares[DTYPES];
    open_fn *const *open; /* by dtype, of half precision */
    close_fn *const *close;
    update_fn *traffic; /* float32, two buffers: for benchmarks */
} instruction_set;

/* The best instruction set that this machine has, or the one that was asked for. */
const instruction_set *cadam_instruction_set(void);

/* The step count after this one: one more, as far as float can count; from 2^24 on, the next number that it has. */
static inline float next_step(float t)
{
    union { float number; int32_t bits; } next = {t};
    next.bits++;
    return t < 0x1p24f ? t + 1 : next.number;
}

typedef void range_fn(int64_t begin, int64_t end, void *context);
typedef int32_t parallel_for_fn(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context);

#endif
