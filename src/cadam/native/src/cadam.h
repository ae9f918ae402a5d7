/* Definitions shared by all parts of the compiled library.
 *
 * The library does not link against torch. Tensors arrive as raw pointers, and work is spread over torch's own threads:
 * the caller passes the address of torch_parallel_for. The compiler may not fuse multiplications and additions
 * (-ffp-contract=off), so every instruction set and any number of threads gives the same bits.
 *
 * Structs that Python fills in are mirrored by numpy dtypes in native/structs.py. They consist of 64-bit fields only.
 */
#ifndef CADAM_H
#define CADAM_H

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* The dtypes of parameters. State and arithmetic are double for F64 and float for all others. */
enum dtype { F32, F64, BF16, F16, DTYPES };

/* The dtypes of moments. FLOAT_MOMENTS are not quantized: they have the dtype of the arithmetic. */
enum moment_storage { FLOAT_MOMENTS, BF16_MOMENTS, INT8_MOMENTS, MOMENT_STORAGES };

enum {
    MAX_BUFFERS = 4,          /* state buffers of a parameter */
    MAX_COEFFICIENTS = 32,    /* coefficients of a kernel */
    MAX_QUANTIZED = 2,        /* quantized state buffers of a parameter */
    QUANTIZATION_BLOCK = 256, /* elements of a dense tensor that share one scale */
    MAX_QUANTIZED_WIDTH = 1024 /* elements of a table's row that kernels for quantized moments can hold */
};

/* Convert values of half precision to float32, and float32 to half precision. */
typedef void widen_fn(const uint16_t *from, float *to, int64_t n);
typedef void narrow_fn(uint16_t *to, const float *from, int64_t n);

/* Update n elements of a parameter: its values, gradients, state buffers and the kernel's coefficients. Returns the
 * number of aligned elements, those whose update and gradient agree in sign. */
typedef int64_t update_fn(void *p, const void *g, void *const *s, int64_t n, const void *c);

/* Update n elements whose moments are quantized. `scales` are the shared exponents of the buffers' blocks, `position` is
 * the index of the first element in its tensor and `noise_key` seeds the stochastic rounding of this step. Returns the
 * number of aligned elements. */
typedef int64_t quantized_update_fn(float *p, const float *g, void *const *s, uint8_t *const *scales, int64_t n,
                                    uint64_t position, uint32_t noise_key, const void *c);

/* One id of a sparse gradient. */
typedef struct {
    uint32_t row;      /* the row that it names, counted within its bucket */
    uint32_t position; /* its position among all ids, which is the row of the gradient values */
} sparse_entry;

/* The distinct rows of a bucket of a table, in order of first appearance, and their gradients.
 *
 * The gradient values of distinct row r are the rows positions[ends[r - 1]] to positions[ends[r] - 1] of `grads`, in order
 * of appearance; those of distinct row 0 begin at positions[0]. */
typedef struct {
    int64_t count, width, dtype;
    int64_t grad_dtype;       /* the dtype of the table, or F32 where the table has half precision */
    const uint32_t *distinct; /* the rows, counted within the bucket */
    const uint32_t *ends, *positions;
    const void *grads;        /* the gradient values of all ids of the step */
    /* Where the first row of the bucket begins: */
    void *p, *s[MAX_BUFFERS];
    uint8_t *scales[MAX_QUANTIZED];
    uint64_t first_position;  /* the index in the table of the first element of the bucket */
    uint32_t noise_key;       /* seeds the stochastic rounding of this step */
    /* Used only where each row counts its own steps, else `steps` is 0: */
    int32_t *steps;           /* the step count of each row of the bucket */
    const int32_t *set_of;    /* the number of the set of coefficients, by step count */
    int32_t last_count;       /* the last step count of set_of; all later ones use its set */
    int64_t set_size;         /* size of a set of coefficients in bytes */
    /* Used only by kernels for exact sparse updates, for which `steps` are the steps of the rows' last updates: */
    const void *aging;        /* the aging coefficients by number of missed steps, in the type of the arithmetic */
    int32_t max_missed;       /* the coefficients do not change after this number of missed steps */
    int32_t now;              /* the number of this step */
} row_batch;

/* Sum the gradients of each row and update the row. Returns the number of aligned elements. */
typedef int64_t update_rows_fn(const row_batch *rows, const void *c);

/* Sum the gradients of each row. Returns the sum of the squares of these sums. */
typedef double squared_norm_fn(const row_batch *rows);

/* The kernels of one rule with one set of state buffers. A missing kernel is 0. */
typedef struct {
    const char *name; /* the name that codegen/kernel_spec.py gives it */
    int buffers, coefficients;
    update_fn *dense[DTYPES];
    update_rows_fn *sparse[DTYPES];
    update_rows_fn *sparse_float_grads[DTYPES];            /* for tables of half precision with float32 gradients */
    quantized_update_fn *quantized[MOMENT_STORAGES];
    update_rows_fn *quantized_sparse[MOMENT_STORAGES];
    update_rows_fn *row_moment_sparse[MOMENT_STORAGES];    /* where each row has one second moment */
} kernel;

/* All kernels, compiled for one instruction set. */
typedef struct {
    const kernel *kernels;
    int count;
    squared_norm_fn *squared_norm[DTYPES];
    widen_fn *const *widen; /* by dtype, for half precision */
    narrow_fn *const *narrow;
    update_fn *memory_traffic; /* float32 with two buffers, for benchmarks */
} instruction_set;

/* The best instruction set of this processor, or the one chosen by cadam_limit_instruction_set. */
const instruction_set *cadam_instruction_set(void);

/* The coefficients of a kernel in both arithmetics, because float and double tensors may share one set. */
typedef struct {
    float f[MAX_COEFFICIENTS];
    double d[MAX_COEFFICIENTS];
} coefficients;

static inline void convert_coefficients(coefficients *to, const double *from)
{
    for (int i = 0; i < MAX_COEFFICIENTS; i++) {
        to->f[i] = (float)from[i];
        to->d[i] = from[i];
    }
}

static inline const void *coefficients_for(const coefficients *c, int64_t dtype)
{
    return dtype == F64 ? (const void *)c->d : (const void *)c->f;
}

/* The size of a parameter's element and of its state's element, in bytes. */
static inline int64_t param_size(int64_t dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }
static inline int64_t state_size(int64_t dtype, int64_t moments)
{
    return moments == INT8_MOMENTS ? 1 : moments == BF16_MOMENTS ? 2 : dtype == F64 ? 8 : 4;
}

/* Return the step count after t. Float32 represents every integer up to 2^24 exactly. From there on the count moves to the
 * next larger float, so that it still grows. */
static inline float next_step(float t)
{
    union { float number; int32_t bits; } next = {t};
    next.bits++;
    return t < 0x1p24f ? t + 1 : next.number;
}

/* The finalizer of MurmurHash3 (fmix32), which stochastic rounding uses to turn counters into noise. */
static inline __attribute__((always_inline)) uint32_t mix_bits(uint32_t x)
{
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

/* Return the seed of the stochastic rounding of one step; `step` is counted from 1. */
static inline uint32_t noise_key(uint64_t seed, float step)
{
    return mix_bits((uint32_t)seed ^ mix_bits((uint32_t)(seed >> 32) ^ mix_bits((uint32_t)(int64_t)step)));
}

typedef void range_fn(int64_t begin, int64_t end, void *context);
typedef int32_t parallel_for_fn(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context);

/* Call f once for the whole range on the calling thread. Replaces torch_parallel_for where waking threads costs more than
 * the work, and after a fork, where torch's threads do not exist. */
int32_t cadam_run_inline(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context);

#endif
