/* Vectors of floats, as wide as the instruction set allows, and the operations that quantized moments need.
 *
 * Two vectors of floats are processed together. A third vector holds their upper halves as 16-bit words: bfloat16 values
 * are these words, and int8 values are made from them. The compiler would split wider vectors and compare them element by
 * element. */
#ifndef VECTORS_H
#define VECTORS_H

#include "cadam.h"

#include <string.h>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#ifdef __AVX512F__
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { PAIR = 2 * LANES };  /* elements that are updated together */
enum { SUMS = 16 / LANES }; /* vectors that hold the 16 lanes of a sum, so that every instruction set adds in the same order */
typedef uint32_t bits_t __attribute__((vector_size(4 * LANES)));
typedef int32_t mask_t __attribute__((vector_size(4 * LANES)));
typedef float floats_t __attribute__((vector_size(4 * LANES)));
typedef uint16_t words_t __attribute__((vector_size(4 * LANES)));
typedef int16_t signed_words_t __attribute__((vector_size(4 * LANES)));
typedef uint8_t bytes_t __attribute__((vector_size(2 * LANES)));
typedef int8_t signed_bytes_t __attribute__((vector_size(2 * LANES)));
typedef struct {
    floats_t a, b;
} pair_t;

#define INLINE static inline __attribute__((always_inline))

INLINE bits_t blend(mask_t test, bits_t yes, bits_t no) { return ((bits_t)test & yes) | (~(bits_t)test & no); }

/* Select words of two vectors by number. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (words_t){__VA_ARGS__})
#endif
#define FOUR(F, i) F(i), F(i + 1), F(i + 2), F(i + 3)
#define EIGHT(F, i) FOUR(F, i), FOUR(F, i + 4)
#define SIXTEEN(F, i) EIGHT(F, i), EIGHT(F, i + 8)
#ifdef __AVX512F__
#define NUMBERS(F) SIXTEEN(F, 0), SIXTEEN(F, 16)
#define COUNTING EIGHT(, 0), EIGHT(, 8)
#elif defined(__AVX2__)
#define NUMBERS(F) SIXTEEN(F, 0)
#define COUNTING EIGHT(, 0)
#else
#define NUMBERS(F) EIGHT(F, 0)
#define COUNTING FOUR(, 0)
#endif
#define UPPER(i) 2 * (i) + 1

#if defined(__SSE2__) && !defined(__AVX2__) /* the compiler would move the words one by one */
INLINE words_t upper_halves(bits_t a, bits_t b)
{
    return (words_t)_mm_packs_epi32(_mm_srai_epi32((__m128i)a, 16), _mm_srai_epi32((__m128i)b, 16));
}

INLINE words_t interleave_low(words_t x, words_t y) { return (words_t)_mm_unpacklo_epi16((__m128i)x, (__m128i)y); }
INLINE words_t interleave_high(words_t x, words_t y) { return (words_t)_mm_unpackhi_epi16((__m128i)x, (__m128i)y); }
#else
#define INTERLEAVE_LOW(i) (i) % 2 ? PAIR + (i) / 2 : (i) / 2
#define INTERLEAVE_HIGH(i) LANES + (INTERLEAVE_LOW(i))
INLINE words_t upper_halves(bits_t a, bits_t b) { return SHUFFLE((words_t)a, (words_t)b, NUMBERS(UPPER)); }
INLINE words_t interleave_low(words_t x, words_t y) { return SHUFFLE(x, y, NUMBERS(INTERLEAVE_LOW)); } /* x[0], y[0], x[1], y[1], ... */
INLINE words_t interleave_high(words_t x, words_t y) { return SHUFFLE(x, y, NUMBERS(INTERLEAVE_HIGH)); }
#endif

INLINE pair_t from_upper_halves(words_t x)
{
    return (pair_t){(floats_t)interleave_low((words_t){0}, x), (floats_t)interleave_high((words_t){0}, x)};
}

/* Round the values to their upper halves stochastically: the noise is added to the lower halves and may carry. */
INLINE words_t round_to_upper_halves(bits_t a, bits_t b, words_t noise)
{
    return upper_halves(a + (bits_t)interleave_low(noise, (words_t){0}), b + (bits_t)interleave_high(noise, (words_t){0}));
}

/* Operations for which the compiler does not find the best instructions. Integers that are compared are not negative. */
#ifdef __AVX512F__
INLINE words_t extend_signed(bytes_t x) { return (words_t)_mm512_cvtepi8_epi16((__m256i)x); }
INLINE words_t extend_positive(bytes_t x) { return (words_t)_mm512_cvtepu8_epi16((__m256i)x); }

INLINE words_t zero_where_zero(words_t code, uint16_t size, words_t x) /* x, but zero where the bits `size` of the code are all zero */
{
    const __mmask32 has_size = _mm512_test_epi16_mask((__m512i)code, _mm512_set1_epi16((short)size));
    return (words_t)_mm512_maskz_mov_epi16(has_size, (__m512i)x);
}

INLINE words_t nan_where_equal(words_t code, uint16_t nan_code, words_t x) /* x, but the upper half of NaN where the code is nan_code */
{
    const __mmask32 is_nan = _mm512_cmpeq_epi16_mask((__m512i)code, _mm512_set1_epi16((short)nan_code));
    return (words_t)_mm512_mask_mov_epi16((__m512i)x, is_nan, _mm512_set1_epi16(0x7fc0));
}

INLINE bits_t keep_where_nonzero(bits_t size, bits_t x) /* x, but zero where the size is zero */
{
    return (bits_t)_mm512_maskz_mov_epi32(_mm512_test_epi32_mask((__m512i)size, (__m512i)size), (__m512i)x);
}

INLINE floats_t sign_of(floats_t x)
{
    const __mmask16 has_sign = _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_NEQ_OQ); /* neither zero nor NaN */
    const __m512i sign = _mm512_set1_epi32((int)0x80000000), one = _mm512_set1_epi32(0x3f800000);
    enum { X_AND_Y_OR_Z = 0xea };
    return (floats_t)_mm512_maskz_ternarylogic_epi32(has_sign, (__m512i)x, sign, one, X_AND_Y_OR_Z);
}

INLINE floats_t masked(floats_t alignment, float threshold, floats_t step)
{
    const __mmask16 moves = _mm512_cmp_ps_mask((__m512)alignment, _mm512_set1_ps(threshold), _CMP_NLE_UQ);
    return (floats_t)_mm512_maskz_mov_ps(moves, (__m512)step);
}

INLINE int64_t count_positive(floats_t x)
{
    return __builtin_popcount(_mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GT_OQ));
}

INLINE int has_nan(pair_t x) { return _mm512_cmp_ps_mask((__m512)x.a, (__m512)x.b, _CMP_UNORD_Q) != 0; }
INLINE bits_t larger(bits_t x, bits_t y) { return (bits_t)_mm512_max_epi32((__m512i)x, (__m512i)y); }
INLINE bits_t smaller(bits_t x, bits_t y) { return (bits_t)_mm512_min_epi32((__m512i)x, (__m512i)y); }
INLINE words_t larger_words(words_t x, words_t y) { return (words_t)_mm512_max_epi16((__m512i)x, (__m512i)y); }
INLINE floats_t square_root(floats_t x) { return (floats_t)_mm512_sqrt_ps((__m512)x); }
INLINE uint32_t largest_of(bits_t x) { return (uint32_t)_mm512_reduce_max_epi32((__m512i)x); }
INLINE float sum_of(const floats_t *x) { return _mm512_reduce_add_ps((__m512)*x); } /* adds the upper half to the lower half, then halves again */
#else
#ifdef __AVX2__
INLINE bits_t larger(bits_t x, bits_t y) { return (bits_t)_mm256_max_epi32((__m256i)x, (__m256i)y); }
INLINE bits_t smaller(bits_t x, bits_t y) { return (bits_t)_mm256_min_epi32((__m256i)x, (__m256i)y); }
INLINE words_t larger_words(words_t x, words_t y) { return (words_t)_mm256_max_epi16((__m256i)x, (__m256i)y); }
INLINE floats_t square_root(floats_t x) { return (floats_t)_mm256_sqrt_ps((__m256)x); }
INLINE int64_t count_positive(floats_t x) { return __builtin_popcount((unsigned)_mm256_movemask_ps((__m256)(x > 0))); }
#else
INLINE bits_t larger(bits_t x, bits_t y) { return blend((mask_t)x > (mask_t)y, x, y); }
INLINE bits_t smaller(bits_t x, bits_t y) { return blend((mask_t)x < (mask_t)y, x, y); }
INLINE words_t larger_words(words_t x, words_t y)
{
    const words_t test = (words_t)((signed_words_t)x > (signed_words_t)y);
    return (test & x) | (~test & y);
}

INLINE floats_t square_root(floats_t x)
{
    for (int k = 0; k < LANES; k++)
        x[k] = __builtin_sqrtf(x[k]);
    return x;
}

INLINE int64_t count_positive(floats_t x)
{
    const mask_t positive = x > 0;
    return -(int64_t)(positive[0] + positive[1] + positive[2] + positive[3]);
}
#endif

INLINE words_t extend_signed(bytes_t x)
{
    return (words_t)__builtin_convertvector((signed_bytes_t)x, signed_words_t);
}

INLINE words_t extend_positive(bytes_t x) { return __builtin_convertvector(x, words_t); }
INLINE words_t zero_where_zero(words_t code, uint16_t size, words_t x) { return (words_t)((code & size) != 0) & x; }
INLINE bits_t keep_where_nonzero(bits_t size, bits_t x) { return (bits_t)(size != 0) & x; }

INLINE words_t nan_where_equal(words_t code, uint16_t nan_code, words_t x)
{
    const words_t is_nan = (words_t)(code == nan_code);
    return (is_nan & 0x7fc0) | (~is_nan & x);
}

INLINE floats_t sign_of(floats_t x)
{
    return (floats_t)((bits_t)(x > 0) & 0x3f800000) - (floats_t)((bits_t)(x < 0) & 0x3f800000);
}

INLINE floats_t masked(floats_t alignment, float threshold, floats_t step)
{
    return (floats_t)(~(bits_t)(alignment <= threshold) & (bits_t)step);
}

INLINE int has_nan(pair_t x) /* conservative: finding out costs as much as the code that it would skip */
{
    return (void)x, 1;
}

INLINE uint32_t largest_of(bits_t x)
{
    uint32_t largest = x[0];
    for (int k = 1; k < LANES; k++)
        largest = x[k] > largest ? x[k] : largest;
    return largest;
}

INLINE float sum_of(const floats_t *x) /* adds in the order of the AVX-512 version */
{
    float lanes[SUMS * LANES];
    memcpy(lanes, x, sizeof lanes);
    for (int half = SUMS * LANES / 2; half; half /= 2)
        for (int k = 0; k < half; k++)
            lanes[k] += lanes[k + half];
    return lanes[0];
}
#endif

/* Read the first n elements of a vector from memory, and write them back. */
#define READ_AND_WRITE(name, type, code)                                                                               \
    INLINE type read_##name(const code *x, int64_t n)                                                                  \
    {                                                                                                                  \
        type lanes = {0};                                                                                              \
        const int64_t most = sizeof lanes / sizeof *x;                                                                 \
        memcpy(&lanes, x, (size_t)(n < most ? n : most) * sizeof *x);                                                  \
        return lanes;                                                                                                  \
    }                                                                                                                  \
    INLINE void write_##name(code *x, type lanes, int64_t n)                                                           \
    {                                                                                                                  \
        const int64_t most = sizeof lanes / sizeof *x;                                                                 \
        memcpy(x, &lanes, (size_t)(n < most ? n : most) * sizeof *x);                                                  \
    }
READ_AND_WRITE(floats, floats_t, float)
READ_AND_WRITE(some_words, words_t, uint16_t)
READ_AND_WRITE(bytes, bytes_t, uint8_t)

/* Half a vector of words, which is all that a row of 16 elements has. The compiler would move it through memory. */
#ifdef __AVX512F__
INLINE words_t read_words(const uint16_t *x, int64_t n)
{
    return n == LANES ? (words_t)_mm512_zextsi256_si512(_mm256_loadu_si256((const void *)x)) : read_some_words(x, n);
}

INLINE void write_words(uint16_t *x, words_t lanes, int64_t n)
{
    if (n == LANES)
        _mm256_storeu_si256((void *)x, _mm512_castsi512_si256((__m512i)lanes));
    else
        write_some_words(x, lanes, n);
}

#else
#define read_words read_some_words
#define write_words write_some_words
#endif

INLINE pair_t read_pair(const float *x, int64_t n)
{
    return (pair_t){read_floats(x, n), n > LANES ? read_floats(x + LANES, n - LANES) : (floats_t){0}};
}

INLINE void write_pair(float *x, pair_t lanes, int64_t n)
{
    write_floats(x, lanes.a, n);
    if (n > LANES)
        write_floats(x + LANES, lanes.b, n - LANES);
}

/* Keep the first n elements and set the others to zero. */
INLINE floats_t first_of(floats_t x, int64_t n)
{
    for (int64_t k = n > 0 ? n : 0; k < LANES; k++)
        x[k] = 0;
    return x;
}

#endif
