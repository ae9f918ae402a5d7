/* Conversion of up to BLOCK values to the type of the arithmetic (widen) and back (narrow). `widen` returns where the values
 * are: in `buffer` for half precision. float and double are used in place. */
#ifndef HALF_PRECISION_H
#define HALF_PRECISION_H

#include "cadam.h"

#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

typedef float value_F32;
typedef double value_F64;
typedef uint16_t value_BF16;
typedef uint16_t value_F16;

static inline float *widen_F32(const float *p, float *buffer, int64_t n) { return (void)buffer, (void)n, (float *)p; }
static inline void narrow_F32(float *p, const float *x, int64_t n) { (void)p, (void)x, (void)n; }
static inline double *widen_F64(const double *p, double *buffer, int64_t n) { return (void)buffer, (void)n, (double *)p; }
static inline void narrow_F64(double *p, const double *x, int64_t n) { (void)p, (void)x, (void)n; }

static inline float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline uint32_t to_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float *widen_BF16(const uint16_t *p, float *buffer, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        buffer[i] = from_bits((uint32_t)p[i] << 16);
    return buffer;
}

static inline void narrow_BF16(uint16_t *p, const float *x, int64_t n) /* rounds to nearest, ties to even; a NaN stays a NaN */
{
    for (int64_t i = 0; i < n; i++) {
        const uint32_t bits = to_bits(x[i]);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        p[i] = (uint16_t)(x[i] != x[i] ? 0x7fc0u : rounded);
    }
}

static inline float float_of_half(uint16_t h)
{
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
    const uint32_t small = to_bits((float)rest * 0x1p-24f); /* subnormal: a multiple of 2^-24 */
    const uint32_t normal = (rest << 13) + (112u << 23), large = (rest << 13) | 0x7f800000u;
    const uint32_t quiet = rest > 0x7c00 ? 0x00400000u : 0;
    return from_bits(sign | (rest < 0x0400 ? small : rest >= 0x7c00 ? large | quiet : normal));
}

static inline uint16_t half_of_float(float x) /* rounds to nearest, ties to even; a NaN stays a NaN */
{
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    const uint32_t small = to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f); /* the last bit of 0.5f is worth 2^-24, as that of subnormal halves */
    const uint32_t normal = (rest + 0xfff + (rest >> 13 & 1) - (112u << 23)) >> 13;
    const uint32_t nan = 0x7e00 | (rest >> 13 & 0x3ff);
    const uint32_t finite = rest < 0x38800000 ? small : normal;
    return (uint16_t)(sign | (rest > 0x7f800000 ? nan : rest >= 0x477ff000 ? 0x7c00u : finite));
}

static inline float *widen_F16(const uint16_t *p, float *buffer, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(buffer + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + i))));
#endif
    for (; i < n; i++)
        buffer[i] = float_of_half(p[i]);
    return buffer;
}

static inline void narrow_F16(uint16_t *p, const float *x, int64_t n)
{
    int64_t i = 0;
#ifdef __F16C__
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(p + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; i++)
        p[i] = half_of_float(x[i]);
}

#endif
