/* Parser of the Criteo text format, which criteo_parser.py describes. That module compiles and calls this code.
 *
 * A text with an invalid line is rejected as a whole; Python then finds the invalid lines and the reasons.
 * The code never reads beyond the end of the text: the last character must be a newline, so any other character is
 * followed by at least one more. */
#include <stdint.h>
#include <string.h>

enum { INTEGERS = 13, FIELDS = INTEGERS + 26, DIGITS = 8 };

/* The value of a hexadecimal digit plus one, and 0 for any other character. */
static const uint8_t digits[256] = {
    ['0'] = 1, ['1'] = 2,  ['2'] = 3,  ['3'] = 4,  ['4'] = 5,  ['5'] = 6,  ['6'] = 7,  ['7'] = 8,
    ['8'] = 9, ['9'] = 10, ['a'] = 11, ['b'] = 12, ['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16,
};

/* Parse a 32-bit integer. Returns its end, or NULL if there is no valid integer. */
static inline const uint8_t *read_integer(const uint8_t *p, uint32_t *value)
{
    const int negative = *p == '-';
    const uint64_t largest = (uint64_t)INT32_MAX + negative;
    const uint8_t *first = p += negative;
    uint64_t n = 0;
    for (; '0' <= *p && *p <= '9'; p++) {
        n = 10 * n + (*p - '0');
        if (n > largest)
            return NULL;
    }
    *value = (uint32_t)(negative ? -n : n);
    return p == first ? NULL : p;
}

/* Parse eight hexadecimal digits that are followed by another character. Returns their end, or NULL if invalid. */
static inline const uint8_t *read_category(const uint8_t *p, const uint8_t *end, uint32_t *value)
{
    if (end - p <= DIGITS)
        return NULL;
    uint32_t n = 0, seen = 0;
    for (int i = 0; i < DIGITS; i++) {
        const uint32_t digit = digits[p[i]] - 1u;
        n = n << 4 | digit;
        seen |= digit;
    }
    *value = n;
    return seen > 15 ? NULL : p + DIGITS;
}

/* Parse a text of `rows` lines into columns.
 *
 * labels:  one byte per row.
 * values:  FIELDS columns of `rows` values; 0 for a missing value.
 * valid:   FIELDS bitmaps that each start at a new byte; the bit of a missing value is 0.
 * missing: the number of missing values of each field.
 *
 * Returns 1 if the text consists of exactly `rows` valid lines. Otherwise it returns 0, and the content of the columns
 * is undefined. */
__attribute__((visibility("default"))) int read_criteo(const uint8_t *text, int64_t size, int64_t rows,
                                                       uint8_t *labels, uint32_t *values, uint8_t *valid,
                                                       int64_t *missing)
{
    const uint8_t *p = text, *const end = text + size;
    const int64_t bytes = (rows + 7) / 8;
    if (size && end[-1] != '\n')
        return 0;
    memset(valid, 0xff, FIELDS * bytes);
    memset(missing, 0, FIELDS * sizeof *missing);
    for (int64_t row = 0; row < rows; row++) {
        if (p == end || (*p != '0' && *p != '1'))
            return 0;
        labels[row] = *p++ - '0';
        for (int field = 0; field < FIELDS; field++) {
            uint32_t value = 0;
            if (*p++ != '\t')
                return 0;
            if (*p == '\t' || *p == '\n') {
                valid[field * bytes + row / 8] &= ~(1u << row % 8);
                missing[field]++;
            } else if (!(p = field < INTEGERS ? read_integer(p, &value) : read_category(p, end, &value))) {
                return 0;
            }
            values[field * rows + row] = value;
        }
        if (*p++ != '\n')
            return 0;
    }
    return p == end;
}
