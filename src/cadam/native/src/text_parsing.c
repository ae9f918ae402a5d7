/* Parsing of text: lines of CSV and JSON are split into values, and values are converted to numbers or hashes.
 *
 * Only simple cases are handled here. Other lines and values are left to the caller, each by itself, so that the result of
 * one never depends on its neighbors.
 */
#include "hashing.h"
#include "structs.h"

#include <float.h>
#include <string.h>

enum { MISSING = -1, IS_NULL = -2 };
enum { NOT_SPLIT, SPLIT, BLANK }; /* status of a line; NOT_SPLIT is left to the caller */
enum { HASH, INTEGER, NUMBER };
enum { BARE, QUOTED, MIXED }; /* whether values are quoted: none, all, or as `quoted` says for each */
enum { MOST_NAMES = 512, LONGEST_NUMBER = 100, LONGEST_TEXT = 1024 };


static int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

static int is_space(uint8_t c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* Whether a text is well-formed UTF-8 without surrogates. */
static int is_utf8(text *s, int64_t n)
{
    for (int64_t i = 0; i < n;) {
        uint64_t eight;
        if (i + 8 <= n && (memcpy(&eight, s + i, 8), !(eight & 0x8080808080808080u))) {
            i += 8;
            continue;
        }
        const uint8_t c = s[i];
        const int more = c < 0x80 ? 0 : c >= 0xc2 && c < 0xe0 ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c < 0xf5 ? 3 : -1;
        if (more < 0 || i + more >= n)
            return 0;
        for (int k = 1; k <= more; k++)
            if ((s[i + k] & 0xc0) != 0x80)
                return 0;
        if ((c == 0xe0 && s[i + 1] < 0xa0) || (c == 0xed && s[i + 1] > 0x9f) || (c == 0xf0 && s[i + 1] < 0x90) ||
            (c == 0xf4 && s[i + 1] > 0x8f))
            return 0;
        i += more + 1;
    }
    return 1;
}

/* Lines ------------------------------------------------------------------------------------------------------- */

/* Split a line of CSV without quotes into its fields. */
static int split_csv(const text_lines *g, int64_t i, int64_t at, int64_t end)
{
    text *s = g->data;
    while (end > at && s[end - 1] == '\r')
        end--;
    if (memchr(s + at, '"', (size_t)(end - at)) || !is_utf8(s + at, end - at))
        return NOT_SPLIT;
    for (int64_t field = 0;; field++) {
        text *found = memchr(s + at, (int)g->separator, (size_t)(end - at));
        const int64_t stop = found ? found - s : end;
        if (field >= g->fields)
            return NOT_SPLIT;
        const int64_t column = g->column_of[field];
        if (column >= 0) {
            g->begin[column * g->stride + i] = stop > at ? at : MISSING;
            g->end[column * g->stride + i] = stop;
        }
        if (!found)
            return field + 1 == g->fields ? SPLIT : NOT_SPLIT;
        at = stop + 1;
    }
}

/* Return the end of the JSON number that begins at `at`, or 0 if there is none. */
static int64_t end_of_number(text *s, int64_t at, int64_t end)
{
    const int64_t begin = at;
    at += at < end && s[at] == '-';
    if (at == end || !is_digit(s[at]))
        return 0;
    if (s[at] == '0')
        at++;
    else
        while (at < end && is_digit(s[at]))
            at++;
    if (at < end && s[at] == '.') {
        if (++at == end || !is_digit(s[at]))
            return 0;
        while (at < end && is_digit(s[at]))
            at++;
    }
    if (at < end && (s[at] | 32) == 'e') {
        at++;
        at += at < end && (s[at] == '-' || s[at] == '+');
        if (at == end || !is_digit(s[at]))
            return 0;
        while (at < end && is_digit(s[at]))
            at++;
    }
    return at - begin > LONGEST_NUMBER ? 0 : at;
}

/* Return the end of the JSON string whose first character is at `at`, or -1 if it does not end or has escapes. */
static int64_t end_of_string(text *s, int64_t at, int64_t end)
{
    while (at < end && s[at] != '"') {
        if (s[at] < ' ' || s[at] == '\\')
            return -1;
        at++;
    }
    return at < end ? at : -1;
}

static int64_t skip_space(text *s, int64_t at, int64_t end)
{
    while (at < end && (s[at] == ' ' || s[at] == '\t' || s[at] == '\r' || s[at] == '\n'))
        at++;
    return at;
}

/* The names of a JSON line in order, and their columns. The next line most likely has the same names. */
typedef struct {
    int64_t begin[MOST_NAMES], size[MOST_NAMES], column[MOST_NAMES];
    int64_t count;
} shape;

static int same_name(const text_lines *g, const shape *known, int64_t k, int64_t begin, int64_t size)
{
    return known->size[k] == size && !memcmp(g->data + known->begin[k], g->data + begin, (size_t)size);
}

static int64_t column_of_name(const text_lines *g, int64_t begin, int64_t size)
{
    int64_t from = 0;
    for (int64_t column = 0; column < g->columns; from = g->name_ends[column++])
        if (g->name_ends[column] - from == size && !memcmp(g->names + from, g->data + begin, (size_t)size))
            return column;
    return -1;
}

static int starts_with(text *s, int64_t at, int64_t end, const char *word, int64_t size)
{
    return end - at >= size && !memcmp(s + at, word, (size_t)size);
}

/* Split a JSON object whose values are strings without escapes, numbers, booleans or null. */
static int split_json(const text_lines *g, int64_t i, int64_t at, int64_t end, shape *known)
{
    text *s = g->data;
    if (!is_utf8(s + at, end - at))
        return NOT_SPLIT;
    for (int64_t column = 0; column < g->columns; column++)
        g->begin[column * g->stride + i] = MISSING;
    at = skip_space(s, at, end);
    if (at == end || s[at] != '{')
        return NOT_SPLIT;
    int64_t count = 0;
    int same_names = 1;
    for (at = skip_space(s, at + 1, end); at < end && (count || s[at] != '}'); at = skip_space(s, at + 1, end)) {
        if (s[at] != '"' || count == MOST_NAMES)
            return NOT_SPLIT;
        const int64_t name = at + 1, name_end = end_of_string(s, name, end);
        if (name_end < 0)
            return NOT_SPLIT;
        if (!same_names || count >= known->count || !same_name(g, known, count, name, name_end - name)) {
            same_names = 0;
            known->size[count] = name_end - name;
            known->column[count] = column_of_name(g, name, name_end - name);
        }
        known->begin[count] = name;
        const int64_t column = known->column[count++];
        at = skip_space(s, name_end + 1, end);
        if (at == end || s[at] != ':')
            return NOT_SPLIT;
        int64_t begin = at = skip_space(s, at + 1, end), stop, quoted = 0;
        if (at == end)
            return NOT_SPLIT;
        if (s[at] == '"') {
            begin = at + 1, stop = end_of_string(s, begin, end), at = stop + 1, quoted = 1;
            if (stop < 0)
                return NOT_SPLIT;
        } else if (starts_with(s, at, end, "null", 4)) {
            begin = IS_NULL, stop = at += 4;
        } else if (starts_with(s, at, end, "true", 4)) {
            stop = at += 4;
        } else if (starts_with(s, at, end, "false", 5)) {
            stop = at += 5;
        } else {
            stop = at = end_of_number(s, at, end);
            if (!at)
                return NOT_SPLIT;
        }
        if (column >= 0) {
            g->begin[column * g->stride + i] = begin, g->end[column * g->stride + i] = stop;
            g->quoted[column * g->stride + i] = (uint8_t)quoted;
        }
        at = skip_space(s, at, end);
        if (at == end || s[at] == '}')
            break;
        if (s[at] != ',')
            return NOT_SPLIT;
    }
    if (at == end || skip_space(s, at + 1, end) < end)
        return NOT_SPLIT;
    for (int64_t k = 1; !same_names && k < count; k++)
        for (int64_t earlier = 0; earlier < k; earlier++)
            if (same_name(g, known, earlier, known->begin[k], known->size[k]))
                return NOT_SPLIT;
    known->count = count;
    return SPLIT;
}

/* Split lines of CSV (if `fields` is not 0) or JSON into the values of columns. */
EXPORT void cadam_split_lines(const text_lines *g)
{
    shape known = {.count = 0};
    for (int64_t i = 0; i < g->n; i++) {
        int64_t begin = g->line_begin[i];
        const int64_t end = g->line_end[i];
        while (begin < end && is_space(g->data[begin]))
            begin++;
        if (begin == end)
            g->status[i] = BLANK;
        else if (g->fields)
            g->status[i] = (uint8_t)split_csv(g, i, g->line_begin[i], end);
        else if ((g->status[i] = (uint8_t)split_json(g, i, begin, end, &known)) == NOT_SPLIT)
            known.count = 0;
    }
}

/* Values ------------------------------------------------------------------------------------------------------ */

/* Return 1 or 0 for a text that is true or false as JSON, Python or R writes it, else -1. */
static int read_boolean(text *s, int64_t size)
{
    if (size == 4 && (s[0] | 32) == 't' && (!memcmp(s + 1, "rue", 3) || !memcmp(s, "TRUE", 4)))
        return 1;
    return size == 5 && (s[0] | 32) == 'f' && (!memcmp(s + 1, "alse", 4) || !memcmp(s, "FALSE", 5)) ? 0 : -1;
}

/* Read an integer of at most 18 digits, with or without a minus sign. Returns 0 if the text is something else. */
static int read_integer(text *s, int64_t size, int64_t *out)
{
    const int negative = size && s[0] == '-';
    int64_t value = 0;
    if (size == negative || size > 18 + negative)
        return 0;
    for (int64_t i = negative; i < size; i++) {
        if (!is_digit(s[i]))
            return 0;
        value = 10 * value + (s[i] - '0');
    }
    *out = negative ? -value : value;
    return 1;
}

/* Read an integer in its usual notation: "5" and "5.0", but not "05". Returns 0 if the text is something else. */
static int read_usual_integer(text *s, int64_t size, int64_t *out)
{
    const int negative = size && s[0] == '-';
    if (size == negative || !is_digit(s[negative]) || (s[negative] == '0' && (negative || (size > 1 && s[1] != '.'))))
        return 0;
    text *dot = memchr(s, '.', (size_t)size);
    const int64_t whole = dot ? dot - s : size;
    if (dot && (whole + 1 == size || whole > 15))
        return 0;
    for (int64_t i = whole + 1; i < size; i++)
        if (s[i] != '0')
            return 0;
    return read_integer(s, whole, out);
}

/* Hash a value to one of `buckets` buckets: an integer by its value, so that "5" and 5 share a bucket, else the text. With 0
 * buckets the result is an id: an integer itself, or the hash of a text, which is never the smallest integer. */
static int read_hash(text *s, int64_t size, int may_be_text, uint64_t buckets, int64_t *out)
{
    int64_t whole = read_boolean(s, size);
    if (whole >= 0 || read_usual_integer(s, size, &whole)) {
        *out = buckets ? (int64_t)(mix_splitmix64((uint64_t)whole) % buckets) : whole;
        return 1;
    }
    if (!may_be_text || size > LONGEST_TEXT || !is_utf8(s, size))
        return 0;
    int64_t digits = size && s[0] == '-';
    while (size > 15 && digits < size && is_digit(s[digits]))
        digits++;
    /* The caller decides whether a text of many digits is an integer that fits into 64 bits. */
    if (size > 15 && (digits == size || s[digits] == '.'))
        return 0;
    const uint64_t hash = mix_splitmix64(fnv1a(s, size));
    *out = (int64_t)(buckets ? hash % buckets : hash + (hash == (uint64_t)1 << 63));
    return 1;
}

/* Read a decimal number. Returns 0 if the text is something else, or if the result might not be rounded correctly. */
static int read_number(text *s, int64_t size, double *out)
{
    static const double tens[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                  1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    const int negative = size && s[0] == '-';
    uint64_t digits = 0;
    int64_t i = negative, count = 0, power = 0;
    for (; i < size && is_digit(s[i]); i++, count++)
        digits = 10 * digits + (uint64_t)(s[i] - '0');
    if (i < size && s[i] == '.')
        for (i++; i < size && is_digit(s[i]); i++, count++, power--)
            digits = 10 * digits + (uint64_t)(s[i] - '0');
    if (!count || count > 19 || (negative && !digits)) /* in JSON, -0 is an integer without a sign */
        return 0;
    if (i < size && (s[i] | 32) == 'e') {
        i++;
        const int minus = i < size && s[i] == '-';
        i += i < size && (s[i] == '-' || s[i] == '+');
        int64_t exponent = 0, first = i;
        for (; i < size && is_digit(s[i]) && i < first + 4; i++)
            exponent = 10 * exponent + (s[i] - '0');
        if (i == first)
            return 0;
        power += minus ? -exponent : exponent;
    }
    if (i != size || power < -22 || power > 22)
        return 0;
    double value;
    if (digits <= (uint64_t)1 << 53) {
        value = power < 0 ? (double)digits / tens[-power] : (double)digits * tens[power];
    } else {
#if LDBL_MANT_DIG == 64
        const long double wide = power < 0 ? digits / (long double)tens[-power] : digits * (long double)tens[power];
        uint64_t mantissa;
        memcpy(&mantissa, &wide, 8);
        if ((mantissa & 0x7ff) == 0x400) /* exactly between two doubles: the side on which the number lies is lost */
            return 0;
        value = (double)wide;
#else
        return 0;
#endif
    }
    *out = negative ? -value : value;
    return 1;
}

/* Convert values, and write which of them were converted. */
EXPORT void cadam_read_values(const text_values *g)
{
    for (int64_t i = 0; i < g->n; i++) {
        g->is_parsed[i] = 0;
        if (g->begin[i] < 0)
            continue;
        text *s = g->data + g->begin[i];
        const int64_t size = g->end[i] - g->begin[i];
        const int quoted = g->quoting == MIXED ? g->quoted[i] : g->quoting == QUOTED;
        if (g->parse_as == HASH) {
            g->is_parsed[i] = (uint8_t)read_hash(s, size, quoted || g->quoting == BARE, (uint64_t)g->buckets,
                                              (int64_t *)g->out + i);
        } else if (quoted || size > LONGEST_NUMBER) {
            continue;
        } else if (g->parse_as == INTEGER) {
            g->is_parsed[i] = (uint8_t)read_integer(s, size, (int64_t *)g->out + i);
        } else {
            double *out = (double *)g->out + i;
            const int boolean = g->accepts_booleans ? read_boolean(s, size) : -1;
            g->is_parsed[i] = boolean >= 0 || read_number(s, size, out);
            if (boolean >= 0)
                *out = boolean;
        }
    }
}
