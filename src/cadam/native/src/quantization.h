/* Quantized moments: bfloat16, or int8 with an exponent that the elements of a block share. cadam/rules/moment_storage.py
 * defines the formats and their rounding; cadam/engines/quantization.py has the same functions in torch. */
#ifndef QUANTIZATION_H
#define QUANTIZATION_H

#include "vectors.h"

/* The element functions of rules.h for vectors of floats. */
#pragma push_macro("MAXIMUM")
#pragma push_macro("SIGN")
#pragma push_macro("SCALED")
#pragma push_macro("MASKED")
#undef MAXIMUM
#undef SIGN
#undef SCALED
#undef MASKED
#define MAXIMUM(x, y) (floats_t) blend(((x) > (y)) | ((x) != (x)), (bits_t)(x), (bits_t)(y))
#define SIGN(x) sign_of(x)
#define SCALED(x, factor) ((factor) == 0 ? (floats_t){0} : (x) * (factor))
#define MASKED(alignment, step) masked(alignment, c->threshold, step)
#define real floats_t
#define scalar float
#define SQRT(x) square_root(x)
#define ELEMENT(name) name##_lanes
#define COEFFICIENTS(name) name##_lanes_c
#include "rules.h"
#undef COEFFICIENTS
#undef ELEMENT
#undef SQRT
#undef scalar
#undef real
#pragma pop_macro("MAXIMUM")
#pragma pop_macro("SIGN")
#pragma pop_macro("SCALED")
#pragma pop_macro("MASKED")

/* An int8 value keeps the upper bits of a float32, relative to a shared exponent. SHIFT is the number of lower mantissa bits
 * that it drops: signed moments keep 2 mantissa bits and a sign, positive moments keep 3 mantissa bits. */
enum { SHIFT_signed = 21, SHIFT_positive = 20 };

/* The int8 value, without its sign, that stands for NaN. It is the largest one. */
enum { NAN_signed = 127, NAN_positive = 255 };

/* The bits of a rounded word that are its magnitude, and the sign bit of an int8 value. */
enum { SIZE_BITS_signed = 0x7fff, SIZE_BITS_positive = 0xffff };
enum { SIGN_signed = 0x80, SIGN_positive = 0 };

/* Whether a block of int8 values may have one that stands for NaN. Asking once for a block takes less time than looking
 * for NaN in each vector. All values of NaN have the byte 0xff if the bits of `sign` are set. */
INLINE int may_have_nan(const uint8_t *codes, int64_t n, uint8_t sign)
{
#ifdef __AVX512F__
    if (n % 64 == 0) {
        __m512i largest = _mm512_setzero_si512();
        for (int64_t i = 0; i < n; i += 64)
            largest = _mm512_max_epu8(largest, _mm512_or_si512(_mm512_loadu_si512(codes + i), _mm512_set1_epi8((char)sign)));
        return _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8((char)0xff)) != 0;
    }
#endif
    return (void)codes, (void)n, (void)sign, 1;
}

/* Dequantize int8 values to the upper halves of floats, whose lower halves are zero. `base` is the upper half of the
 * smallest value of the block. After sign extension the upper bits of a signed value all equal its sign. */
INLINE words_t dequantize_signed(bytes_t codes, uint16_t base, int has_nan)
{
    const words_t code = extend_signed(codes), x = zero_where_zero(code, 0x7f, (code << (SHIFT_signed - 16) & 0x8fff) + base);
    return __builtin_expect(has_nan, 0) ? nan_where_equal(code & NAN_signed, NAN_signed, x) : x;
}

INLINE words_t dequantize_positive(bytes_t codes, uint16_t base, int has_nan)
{
    const words_t code = extend_positive(codes), x = zero_where_zero(code, 0xff, (code << (SHIFT_positive - 16)) + base);
    return __builtin_expect(has_nan, 0) ? nan_where_equal(code, NAN_positive, x) : x;
}

/* The first half of quantization, which does not need the shared exponent: round stochastically to the bits that an int8
 * value keeps, one in each word. `sizes` collects the largest rounded magnitudes. Positive moments that are not
 * zero are raised to the smallest int8 value, because a zero second moment would divide by zero. */
INLINE words_t round_signed(pair_t x, words_t noise, words_t *sizes)
{
    const bits_t a = (bits_t)x.a, b = (bits_t)x.b;
    const words_t upper = upper_halves(a, b);
    const words_t size = round_to_upper_halves((a & 0x7fffffff) >> (SHIFT_signed - 16), (b & 0x7fffffff) >> (SHIFT_signed - 16), noise);
    *sizes = larger_words(*sizes, size);
    return size | (upper & 0x8000);
}

INLINE words_t round_positive(pair_t x, words_t noise, words_t *sizes)
{
    const bits_t a = (bits_t)x.a & 0x7fffffff, b = (bits_t)x.b & 0x7fffffff, least = (bits_t){0} + (1u << SHIFT_positive);
    const words_t size = round_to_upper_halves(keep_where_nonzero(a, larger(a, least)) >> (SHIFT_positive - 16),
                                               keep_where_nonzero(b, larger(b, least)) >> (SHIFT_positive - 16), noise);
    *sizes = larger_words(*sizes, size);
    return size;
}

INLINE bytes_t quantize_signed(words_t x, uint16_t base)
{
    const words_t size = larger_words(x & 0x7fff, (words_t){0} + base) - base;
    return __builtin_convertvector(size | (x >> 8 & 0x80), bytes_t);
}

INLINE bytes_t quantize_positive(words_t x, uint16_t base)
{
    const words_t least = (words_t){0} + (uint16_t)(base + 1);
    return __builtin_convertvector(zero_where_zero(x, 0xffff, larger_words(x, least) - base), bytes_t);
}

/* Round to bfloat16. Adding noise to a NaN that has all bits set would overflow, so NaNs get fewer bits. */
INLINE bits_t without_overflow(floats_t x)
{
    const bits_t negative = (bits_t)((mask_t)x < 0) & 0x80000000;
    return negative | smaller((bits_t)x & 0x7fffffff, (bits_t){0} + 0x7fc00000);
}

INLINE words_t to_bfloat16(pair_t x, words_t noise)
{
    if (__builtin_expect(has_nan(x), 0))
        return round_to_upper_halves(without_overflow(x.a), without_overflow(x.b), noise);
    return round_to_upper_halves((bits_t)x.a, (bits_t)x.b, noise);
}

/* Return the shared exponent of a block, given its largest rounded magnitude: the exponent of that number, or the next one
 * if its int8 value would stand for NaN. The result is 255 if an element is infinite, NaN, or almost infinite. */
INLINE uint32_t shared_exponent(uint32_t largest, uint32_t shift)
{
    const uint32_t exponent = (largest + 1) >> (23 - shift);
    return exponent < 32 ? 32 : exponent;
}

/* The number that is subtracted from the rounded bits of a float to get an int8 value. */
#define LEAST(exponent, shift) (((exponent)-31) << (23 - (shift)))

/* Return the shared exponent of the finite elements of a block, and make the other ones so large that they get the int8
 * value of NaN. `size_bits` masks the magnitude of the rounded elements. */
static __attribute__((noinline, unused)) uint32_t shared_exponent_of_finite(words_t *rounded, int64_t pairs, uint32_t shift,
                                                                            uint16_t size_bits)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < pairs * PAIR; i++) {
        const uint32_t size = rounded[i / PAIR][i % PAIR] & size_bits;
        if (size > largest && shared_exponent(size, shift) < 255)
            largest = size;
    }
    const uint32_t exponent = shared_exponent(largest, shift);
    for (int64_t i = 0; i < pairs * PAIR; i++) {
        const uint16_t x = rounded[i / PAIR][i % PAIR];
        if (shared_exponent(x & size_bits, shift) >= 255)
            rounded[i / PAIR][i % PAIR] = (uint16_t)((x & ~size_bits) | (LEAST(exponent, shift) + (32 << (23 - shift)) - 1));
    }
    return exponent;
}

INLINE uint32_t largest_of_words(words_t sizes)
{
    const bits_t both = (bits_t)sizes;
    return largest_of(larger(both >> 16, both & 0xffff));
}

/* Return the rounding noise of a pair of vectors: 16 bits for each element, from a hash of the element's position. `word` is
 * the lower half of the position divided by two, and `inner` is the hash of the noise key and the upper half of the
 * position. The first quantized buffer uses the words as they are, and the second one swaps neighbors. If the position is a
 * multiple of the number of lanes, the words differ in their last bits only, which the first step of `mix_bits` leaves as
 * they are, so that step is done once for all of them. */
INLINE words_t noise_at(uint32_t word, uint32_t inner, const int is_multiple)
{
    const uint32_t first = word ^ inner;
    bits_t x = {COUNTING};
    if (is_multiple)
        x ^= first ^ first >> 16;
    else {
        x = (x + word) ^ inner;
        x ^= x >> 16;
    }
    x *= 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return (words_t)(x ^ (x >> 16));
}

INLINE words_t swap_noise(words_t noise) { return (words_t)((bits_t)noise << 16 | (bits_t)noise >> 16); }

/* Int8 moments of a row that fits into one vector. The whole row is in registers, so nothing needs to be stored until the
 * largest element is known. */
#ifdef __AVX512F__
INLINE floats_t dequantize_vector_signed(const uint8_t *codes, uint32_t scale)
{
    const __m512i x = _mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)codes));
    const __m512i sizes = _mm512_set1_epi32(0x7f);
    const __mmask16 any = _mm512_test_epi32_mask(x, sizes), is_nan = _mm512_cmpeq_epi32_mask(_mm512_and_epi32(x, sizes), sizes);
    const __m512i moved = _mm512_and_epi32(_mm512_slli_epi32(x, SHIFT_signed), _mm512_set1_epi32((int)0x8fffffff));
    const __m512i sum = _mm512_maskz_add_epi32(any, moved, _mm512_set1_epi32((int)((scale - 31) << 23)));
    return (floats_t)_mm512_mask_set1_epi32(sum, is_nan, 0x7fc00000);
}

INLINE floats_t dequantize_vector_positive(const uint8_t *codes, uint32_t scale)
{
    const __m512i x = _mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)codes));
    const __mmask16 any = _mm512_test_epi32_mask(x, x), is_nan = _mm512_cmpeq_epi32_mask(x, _mm512_set1_epi32(NAN_positive));
    const __m512i moved = _mm512_slli_epi32(x, SHIFT_positive);
    const __m512i sum = _mm512_maskz_add_epi32(any, moved, _mm512_set1_epi32((int)((scale - 31) << 23)));
    return (floats_t)_mm512_mask_set1_epi32(sum, is_nan, 0x7fc00000);
}

/* The noise of one vector, equal to that of noise_at and swap_noise. */
INLINE __m256i noise_of_vector(uint32_t word, uint32_t inner)
{
    const uint32_t first = word ^ inner;
    __m256i x = _mm256_xor_si256(_mm256_setr_epi32(EIGHT(, 0)), _mm256_set1_epi32((int)(first ^ first >> 16)));
    x = _mm256_mullo_epi32(x, _mm256_set1_epi32((int)0x85EBCA6Bu));
    x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 13)), _mm256_set1_epi32((int)0xC2B2AE35u));
    return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

INLINE __m256i swap_noise_of_vector(__m256i noise) { return _mm256_rol_epi32(noise, 16); }

/* Round magnitudes stochastically; the upper halves are the result. */
INLINE bits_t round_vector(floats_t x, unsigned shift, __m256i noise)
{
    return (((bits_t)x & 0x7fffffff) >> (shift - 16)) + (bits_t)_mm512_cvtepu16_epi32(noise);
}

/* A version of shared_exponent_of_finite for one vector. */
INLINE uint32_t shared_exponent_of_finite_lanes(bits_t *rounded, uint32_t shift)
{
    const bits_t size = *rounded >> 16, limit = (bits_t){0} + (255u << (23 - shift)) - 1;
    const bits_t is_finite = (bits_t)((mask_t)size < (mask_t)limit);
    const uint32_t exponent = shared_exponent(largest_of(size & is_finite), shift);
    const uint32_t nan = LEAST(exponent, shift) + (32u << (23 - shift)) - 1;
    *rounded = ((size & is_finite) | (~is_finite & nan)) << 16;
    return exponent;
}

/* Subtract the base from the rounded magnitudes; the result is at least zero. */
INLINE bits_t above_base(bits_t rounded, uint32_t base)
{
    return (bits_t)_mm512_subs_epu16(_mm512_srli_epi32((__m512i)rounded, 16), _mm512_set1_epi32((int)base));
}

INLINE void quantize_vector_signed(uint8_t *codes, floats_t x, bits_t rounded, uint32_t base)
{
    const bits_t code = above_base(rounded, base) | ((bits_t)x >> 24 & 0x80);
    _mm_storeu_si128((void *)codes, _mm512_cvtepi32_epi8((__m512i)code));
}

INLINE void quantize_vector_positive(uint8_t *codes, floats_t x, bits_t rounded, uint32_t base)
{
    const bits_t code = larger(above_base(rounded, base), (bits_t){0} + 1);
    _mm_storeu_si128((void *)codes, _mm512_cvtepi32_epi8((__m512i)keep_where_nonzero((bits_t)x & 0x7fffffff, code)));
}

/* Pack the sizes of one buffer into the upper halves and those of another into the lower ones, so that one reduction finds
 * the largest of both. */
INLINE bits_t pack_sizes(bits_t upper, bits_t lower)
{
    return (bits_t)_mm512_mask_mov_epi16((__m512i)upper, 0x55555555, (__m512i)(lower >> 16));
}

INLINE uint32_t largest_packed(bits_t x)
{
    const __m256i y = _mm256_max_epu16(_mm512_castsi512_si256((__m512i)x), _mm512_extracti64x4_epi64((__m512i)x, 1));
    __m128i z = _mm_max_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    z = _mm_max_epu16(z, _mm_shuffle_epi32(z, 0x4e));
    z = _mm_max_epu16(z, _mm_shuffle_epi32(z, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(z);
}
#endif

#endif
