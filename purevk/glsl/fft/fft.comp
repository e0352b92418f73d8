#version 450
#extension GL_GOOGLE_include_directive : enable
// Discrete Fourier transforms of rows, by Stockham's algorithm with mixed radices.
//
// A workgroup transforms ROWS neighbouring rows b of one matrix a, each with THREADS invocations. An
// invocation computes butterflies in registers; between two stages the elements go through shared
// memory. The first stage reads, and the last one writes, memory in the order of neighbours.
//
// Buffers: x, out, twiddles: exp(-2 pi i j / length) for all j (if EXCHANGES).
// Offsets and strides are in elements: complex numbers, or real ones if REAL_IN or REAL_OUT.
// Macros:
//   T_X, T_OUT  elements of x and out: vec2, f16vec2, dvec2; with REAL_IN or REAL_OUT their parts
//   REAL        float or double, COMPLEX its vec2
//   ROWS, THREADS  rows of a workgroup, and invocations per row
//   VALUES      registers of an invocation: the most elements of any stage
//   STAGES      the stages in order: FFT_FIRST, FFT_NEXT, ..., FFT_LAST with their radix, count (the
//               butterflies of an invocation) and before (the product of the radices before)
//   LENGTH      product of all radices
//   COLUMNS_IN, COLUMNS_OUT  1: neighbouring invocations take neighbouring rows when they read or
//               write, else neighbouring elements of a row
//   HALVES      1: shared memory has room for one part of the elements, real or imaginary
//   INVERSE     1: exp(+...): real and imaginary parts change places before and after
//   REAL_IN     1: x has real elements
//   HERMITIAN   1: x has the first half of a spectrum, whose other half are its conjugates
//   REAL_OUT    1: only the real parts are written
//   FIRST_OF_TWO   1: the rows are the columns of a longer row, of which element i of row b is
//               number i * rows + b, and the result is multiplied by exp(-2 pi i b k / whole)
//   SECOND_OF_TWO  1: element k of row b is number k * rows + b of the result
//   EXCHANGES   1: there are two or more stages
//   SCALED      1: the result is multiplied by scale
// Grid: one workgroup per ROWS rows, in x and y.
#include "core/common.glslh"
#ifndef REAL
#define REAL float
#endif
#ifndef COMPLEX
#define COMPLEX vec2
#endif
#ifndef ROWS
#define ROWS 16
#endif
#ifndef THREADS
#define THREADS 1
#endif
#ifndef VALUES
#define VALUES 2
#endif
#ifndef LENGTH
#define LENGTH 2
#endif
#ifndef STAGES
#define STAGES FFT_FIRST(2, 1) FFT_LAST(2, 1)
#endif
#ifndef T_X
#define T_X vec2
#endif
#ifndef T_OUT
#define T_OUT vec2
#endif
#ifndef COLUMNS_IN
#define COLUMNS_IN 0
#endif
#ifndef COLUMNS_OUT
#define COLUMNS_OUT 0
#endif
#ifndef HALVES
#define HALVES 0
#endif
#ifndef INVERSE
#define INVERSE 0
#endif
#ifndef REAL_IN
#define REAL_IN 0
#endif
#ifndef HERMITIAN
#define HERMITIAN 0
#endif
#ifndef REAL_OUT
#define REAL_OUT 0
#endif
#ifndef FIRST_OF_TWO
#define FIRST_OF_TWO 0
#endif
#ifndef SECOND_OF_TWO
#define SECOND_OF_TWO 0
#endif
#ifndef EXCHANGES
#define EXCHANGES 0
#endif
#ifndef SCALED
#define SCALED 0
#endif
#if SCALED && DOUBLE
#define SCALE packDouble2x32(uvec2(scale_low, scale_high))
#elif SCALED
#define SCALE intBitsToFloat(scale_low)
#endif
#include "fft/butterflies.glslh"

layout(local_size_x = ROWS * THREADS) in;
PARAM(0, matrices)
PARAM(1, rows)
PARAM(2, row_groups)
PARAM(3, x_offset)
PARAM(4, x_matrix)
PARAM(5, x_row)
PARAM(6, x_element)
PARAM(7, out_offset)
PARAM(8, out_matrix)
PARAM(9, out_row)
PARAM(10, out_element)
PARAM(11, whole)      // elements of a whole row: LENGTH, or that of the row that was cut in two
PARAM(12, out_length) // elements of a whole row that are written
#if SCALED
PARAM(13, scale_low)
PARAM(14, scale_high)
#endif
READONLY_BUFFER(0, x, T_X)
WRITEONLY_BUFFER(1, out, T_OUT)
#if EXCHANGES
READONLY_BUFFER(2, twiddles, COMPLEX)
#endif

#if FIRST_OF_TWO
#include "fft/roots.glslh"
#endif

// A gap after every 16 elements: strides of powers of 2 go to different banks.
#define PADDED(i) ((i) + ((i) >> 4))
#define ROW_SIZE PADDED(LENGTH)
#if EXCHANGES
#if HALVES
shared REAL pool[ROW_SIZE * ROWS];
#else
shared COMPLEX pool[ROW_SIZE * ROWS];
#endif
#endif
// Rows are interleaved if neighbouring invocations take neighbouring rows.
#if COLUMNS_OUT
#define AT(i) (PADDED(i) * ROWS + row)
#else
#define AT(i) (row * ROW_SIZE + PADDED(i))
#endif

COMPLEX v[VALUES];

// Where this invocation is when it reads (first stage), and after it.
int row, lane;
int first_row, matrix;

void place(bool columns) {
    int id = int(gl_LocalInvocationIndex);
    row = columns ? id % ROWS : id / THREADS;
    lane = columns ? id / ROWS : id % THREADS;
}

COMPLEX load(int i) {
    int b = first_row + row;
    if (matrix >= matrices || b >= rows) return COMPLEX(0.0);
#if FIRST_OF_TWO
    int base = x_offset + matrix * x_matrix, number = i * rows + b;
#else
    int base = x_offset + matrix * x_matrix + b * x_row, number = i;
#endif
#if REAL_IN
    COMPLEX value = COMPLEX(REAL(buf_x[base + number * x_element]), 0.0);
#elif HERMITIAN
    bool mirrored = number > whole / 2;
    COMPLEX value = COMPLEX(buf_x[base + (mirrored ? whole - number : number) * x_element]);
    if (mirrored) value.y = -value.y;
#else
    COMPLEX value = COMPLEX(buf_x[base + number * x_element]);
#endif
    return INVERSE != 0 ? value.yx : value;
}

void store(int k, COMPLEX value) {
    int b = first_row + row;
    if (matrix >= matrices || b >= rows) return;
#if FIRST_OF_TWO
    value = times(value, root_of_unity(uint(b) * uint(k), uint(whole)));
#endif
#if SECOND_OF_TWO
    int base = out_offset + matrix * out_matrix, number = k * rows + b;
#else
    int base = out_offset + matrix * out_matrix + b * out_row, number = k;
#endif
    if (number >= out_length) return;
#if SCALED
    value *= SCALE;
#endif
    if (INVERSE != 0) value = value.yx;
#if REAL_OUT
    buf_out[base + number * out_element] = T_OUT(value.x);
#else
    buf_out[base + number * out_element] = T_OUT(value);
#endif
}

// ---- stages. A butterfly n of radix r has the elements n + k * LENGTH / r.

#define BUTTERFLY(n, radix) (lane + (n) * THREADS)
// Whether all invocations have all of their butterflies.
#define HAS(b, radix, count) ((count) * THREADS * (radix) == LENGTH || (b) < LENGTH / (radix))

#define FFT_FIRST(radix, count) \
    UNROLL for (int n = 0; n < (count); n++) { \
        int b = BUTTERFLY(n, radix); \
        if (HAS(b, radix, count)) \
            UNROLL for (int k = 0; k < (radix); k++) \
                v[n * (radix) + k] = load(b + k * (LENGTH / (radix))); \
        FFT_##radix(n * (radix)) \
    }

// Multiplies the elements of a butterfly by powers of a root of unity: those to powers of 2 are
// read, the others are products of two.
#define TWIDDLE(o, radix, j, before) { \
        COMPLEX w[radix]; \
        int step = (j) * (LENGTH / ((before) * (radix))); \
        UNROLL for (int k = 1; k < (radix); k++) { \
            if ((k & (k - 1)) == 0) w[k] = buf_twiddles[k * step]; \
            else w[k] = times(w[HIGH_BIT(k)], w[k - HIGH_BIT(k)]); \
            v[(o) + k] = times(v[(o) + k], w[k]); \
        } \
    }
#define HIGH_BIT(k) ((k) >= 8 ? 8 : (k) >= 4 ? 4 : (k) >= 2 ? 2 : 1)

// Puts the elements of a stage into shared memory: element k of butterfly b becomes number
// (b / before) * before * radix + b % before + k * before.
#define PUT(radix, count, before, part) \
    UNROLL for (int n = 0; n < (count); n++) { \
        int b = BUTTERFLY(n, radix), at = (b / (before)) * ((before) * (radix)) + b % (before); \
        if (HAS(b, radix, count)) \
            UNROLL for (int k = 0; k < (radix); k++) pool[AT(at + k * (before))] = v[n * (radix) + k] part; \
    }
#define GET(radix, count, part) \
    UNROLL for (int n = 0; n < (count); n++) { \
        int b = BUTTERFLY(n, radix); \
        if (HAS(b, radix, count)) \
            UNROLL for (int k = 0; k < (radix); k++) v[n * (radix) + k] part = pool[AT(b + k * (LENGTH / (radix)))]; \
    }

// A part of the elements, or both, goes from the invocations of a stage to those of the next one.
#define EXCHANGE(radix, count, before, next, next_count, part) \
    PUT(radix, count, before, part) \
    barrier(); \
    place(COLUMNS_OUT != 0); \
    GET(next, next_count, part)
#if HALVES
#define EXCHANGE_ALL(radix, count, before, next, next_count) { \
        int old_row = row, old_lane = lane; \
        EXCHANGE(radix, count, before, next, next_count, .x) \
        barrier(); \
        row = old_row; \
        lane = old_lane; \
        EXCHANGE(radix, count, before, next, next_count, .y) \
    }
#else
#define EXCHANGE_ALL(radix, count, before, next, next_count) EXCHANGE(radix, count, before, next, next_count, .xy)
#endif

// A stage after another one, `last`.
#define FFT_NEXT(radix, count, before, last, last_count, last_before) \
    if ((last_before) > 1) barrier(); \
    EXCHANGE_ALL(last, last_count, last_before, radix, count) \
    UNROLL for (int n = 0; n < (count); n++) { \
        int b = BUTTERFLY(n, radix); \
        if (HAS(b, radix, count)) TWIDDLE(n * (radix), radix, b % (before), before) \
        FFT_##radix(n * (radix)) \
    }
// What the last stage made.
#define FFT_LAST(radix, count) \
    UNROLL for (int n = 0; n < (count); n++) { \
        int b = BUTTERFLY(n, radix); \
        if (HAS(b, radix, count)) \
            UNROLL for (int k = 0; k < (radix); k++) store(b + k * (LENGTH / (radix)), v[n * (radix) + k]); \
    }

void main() {
    int group = int(WORKGROUP_ID.y * gl_NumWorkGroups.x + WORKGROUP_ID.x);
    matrix = group / row_groups;
    first_row = group % row_groups * ROWS;
    place(COLUMNS_IN != 0);
    STAGES
}
