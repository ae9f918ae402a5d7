/* The kernels of all rules, compiled once for every instruction set.
 *
 * Element functions, which update one element, are generated from the rules into rules.h by codegen/c_source.py. The headers
 * included here put loops around them.
 */
#include "half_precision.h"

#include <string.h>

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

enum {
    BLOCK = 64,       /* elements of a dense tensor that are updated together */
    AHEAD = 512,      /* elements of a dense tensor that are prefetched ahead */
    ROWS_AHEAD = 16,  /* rows of a table that are prefetched ahead */
    GRADS_AHEAD = 48  /* gradient rows that are prefetched ahead */
};

static inline void prefetch(const void *p, int64_t i, int64_t size)
{
    const char *at = (const char *)p + (i + AHEAD) * size;
    for (int64_t line = 0; line < BLOCK * size; line += 64)
        __builtin_prefetch(at + line);
}

/* Prefetch a row into the second-level cache, which accepts more outstanding requests than the first-level one. */
static inline void prefetch_row(const void *first, int64_t row, int64_t bytes)
{
    const uintptr_t begin = (uintptr_t)first + (uintptr_t)(row * bytes), end = begin + (uintptr_t)bytes;
    __builtin_prefetch((const void *)begin, 0, 2);
    for (uintptr_t line = (begin | 63) + 1; line < end; line += 64)
        __builtin_prefetch((const void *)line, 0, 2);
}

/* The element functions of rules.h are written in these macros. They are compiled three times: for float, for double and, in
 * quantization.h, for vectors of floats. */
#define MAXIMUM(x, y) ((x) > (y) ? (x) : (x) != (x) ? (x) : (y)) /* a NaN stays a NaN */
#define SIGN(x) ((x) > 0 ? (real)1 : (x) < 0 ? (real)-1 : (real)0)
#define SCALED(x, factor) ((factor) == 0 ? (real)0 : (x) * (factor))
#define MASKED(alignment, step) ((alignment) <= c->threshold ? (real)0 : (step))

#define real float
#define scalar float
#define SQRT(x) __builtin_sqrtf(x)
#define ELEMENT(name) name##_float
#define COEFFICIENTS(name) name##_float_c
#include "rules.h"
#undef COEFFICIENTS
#undef ELEMENT
#undef SQRT
#undef scalar
#undef real

#define real double
#define scalar double
#define SQRT(x) __builtin_sqrt(x)
#define ELEMENT(name) name##_double
#define COEFFICIENTS(name) name##_double_c
#include "rules.h"
#undef COEFFICIENTS
#undef ELEMENT
#undef SQRT
#undef scalar
#undef real

#include "dense_kernels.h"
#include "sparse_kernels.h"
#include "quantization.h"
#include "quantized_kernels.h"

/* The initializers of a rule's kernels, by the number of storages that there are kernels for: none, float32 alone, both
 * quantized storages, or all three. */
#define STORED_0(rule)
#define STORED_2(rule) .quantized = {0, rule##_dense_BF16, rule##_dense_INT8}, STORED_ROWS_2(rule)
#define STORED_ROWS_0(rule)
#define STORED_ROWS_2(rule) .quantized_sparse = {0, rule##_rows_BF16_0, rule##_rows_INT8_0},
#define ROW_MOMENTS_0(rule)
#define ROW_MOMENTS_1(rule) .row_moment_sparse = {rule##_rows_F32_1},
#define ROW_MOMENTS_3(rule) .row_moment_sparse = {rule##_rows_F32_1, rule##_rows_BF16_1, rule##_rows_INT8_1},

#define SPARSE(rule)                                                                                                   \
    .sparse = {rule##_f32_rows, rule##_f64_rows, rule##_bf16_rows, rule##_f16_rows},                                   \
    .sparse_float_grads = {[BF16] = rule##_bf16_float_grads, [F16] = rule##_f16_float_grads},

#define ENTRY(rule, n_buffers, n_coefficients, n_stored, n_by_row)                                                     \
    {                                                                                                                  \
        .name = #rule, .buffers = n_buffers, .coefficients = n_coefficients,                                           \
        .dense = {rule##_f32, rule##_f64, rule##_bf16, rule##_f16},                                                    \
        SPARSE(rule)                                                                                                   \
        STORED_##n_stored(rule) ROW_MOMENTS_##n_by_row(rule)                                                           \
    },
#define AGING_ENTRY(rule, n_buffers, n_coefficients, n_aging, n_stored)                                                \
    {.name = #rule, .buffers = n_buffers, .coefficients = n_coefficients, SPARSE(rule) STORED_ROWS_##n_stored(rule)},
static const kernel kernels[] = {RULES(ENTRY) AGING_RULES(AGING_ENTRY)};

const instruction_set JOIN(cadam_, INSTRUCTIONS) = {
    .kernels = kernels,
    .count = sizeof kernels / sizeof *kernels,
    .squared_norm = {squared_norm_f32, squared_norm_f64, squared_norm_bf16, squared_norm_f16},
    .widen = widen_half,
    .narrow = narrow_half,
    .memory_traffic = traffic_f32,
};
