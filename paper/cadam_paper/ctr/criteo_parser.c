/* Text of Criteo's format to columns of numbers, for parse.py, which says what the format is and compiles this.
 *
 * All or nothing: a text with a bad line is refused as a whole, and Python then says which lines are bad and why.
 * No character is read beyond the last one, which must end a line: whatever is not the end of a line has another
 * character after it. */
#include <stdint.h>
#include <string.h>

enum { INTEGERS = 13, FIELDS = INTEGERS + 26, DIGITS = 8 };

/* One more than what a hexadecimal digit stands for; 0 for any other character. */
static const uint8_t digits[256] = {
    ['0'] = 1, ['1'] = 2,  ['2'] = 3,  ['3'] = 4,  ['4'] = 5,  ['5'] = 6,  ['6'] = 7,  ['7'] = 8,
    ['8'] = 9, ['9'] = 10, ['a'] = 11, ['b'] = 12, ['c'] = 13, ['d'] = 14, ['e'] = 15, ['f'] = 16,
};

/* An integer of 32 bits. Returns where it ends, or NULL if there is none. */
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

/* Eight hexadecimal digits, with another character after them. Returns where they end, or NULL if they are not that. */
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

/* Fill the columns of so many rows: labels; values, field after field, 0 where one is missing; a bit for each value,
 * 0 where it is missing, each field from a new byte on; how many are missing in each field.
 * Returns whether the text is so many lines, all of them good; if not, what the columns hold means nothing. */
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
