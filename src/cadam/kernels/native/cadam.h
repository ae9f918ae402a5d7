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

/* target[i] += or = values[i], in the type of the arithmetic. */
typedef void gather_fn(void *target, const void *values, int64_t n);

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
    gather_fn *set[DTYPES], *add[DTYPES];
} instruction_set;

typedef void range_fn(int64_t begin, int64_t end, void *context);
typedef int32_t parallel_for_fn(int64_t begin, int64_t end, int64_t grain, range_fn *f, void *context);

#endif
