#version 450
#extension GL_GOOGLE_include_directive : enable
// out[row, i] = COMBINE over j <= i of LOAD(x[row, j]), in this order: cumsum, cumprod, logcumsumexp, cummax, cummin.
//
// Bindings: 0 x, 1 out, then 2 the indices (if ARG), or the totals of the parts (if TOTALS).
// Parameters (sizes and strides in elements; outer dim 0 is the innermost):
//   0 offset of x  1 offset of out  2 number of rows  3 length of a row  4, 5 stride along a row in x and in out
//   6, 7, 8, 9 strides in x of the outer dims 0 .. 3  10, 11, 12, 13 those in out  14, 15, 16 sizes of the outer dims 0 .. 2
//   17 length of a part  18 parts of a row  19 offset of the indices
// Macros:
//   T_X, T_OUT, ACC, FROM_X(v), TO_OUT(v)  element types, the type that is computed in, and conversions
//   INIT, COMBINE(a, b)  an identity and an associative operation, of what is left of an element and the element
//   ARG 1       the index of the last of the best elements is kept too; BEATS(b, a) says whether b replaces a
//   TOTALS 1    a row is cut into parts that are scanned for themselves; the result of each part goes to totals[row, part]
//   ROW_PER_INVOCATION 1  an invocation walks along its row, alone
//   WIDTH       rows that a workgroup has at a time: rows.glslh. Needs TOTALS 0
//   ITEMS       elements that an invocation takes at a time, if a workgroup has a row
//   LOCAL       a power of 2, the invocations of a workgroup
// Grid: rows.glslh, with rows = rows * parts.
#undef VEC4
#define VEC4 0
#include "rows.glslh"
#include "math.glslh"

#ifndef T_OUT
#define T_OUT float
#endif
#ifndef ACC
#define ACC float
#endif
#ifndef FROM_X
#define FROM_X(v) ACC(v)
#endif
#ifndef TO_OUT
#define TO_OUT(v) T_OUT(v)
#endif
#ifndef INIT
#define INIT ACC(0)
#endif
#ifndef COMBINE
#define COMBINE(a, b) ((a) + (b))
#endif
#ifndef ARG
#define ARG 0
#endif
#ifndef BEATS
#define BEATS(b, a) ((b) >= (a))
#endif
#ifndef TOTALS
#define TOTALS 0
#endif
#ifndef ITEMS
#define ITEMS 4
#endif
#ifndef T_INDEX
#define T_INDEX int
#endif

PARAM_0(x_offset)
PARAM_1(out_offset)
PARAM_2(rows)
PARAM_3(row_length)
PARAM_4(x_step)
PARAM_5(out_step)
PARAM_6(x_0)
PARAM_7(x_1)
PARAM_8(x_2)
PARAM_9(x_3)
PARAM_10(out_0)
PARAM_11(out_1)
PARAM_12(out_2)
PARAM_13(out_3)
PARAM_14(size_0)
PARAM_15(size_1)
PARAM_16(size_2)
#if TOTALS
PARAM_17(part)
PARAM_18(parts)
#endif
#if ARG
PARAM_19(index_offset)
#endif

layout(set = 0, binding = 1) buffer BufOut { T_OUT buf_out[]; };
#if ARG
layout(set = 0, binding = 2) buffer BufIndex { T_INDEX buf_index[]; };
#elif TOTALS
layout(set = 0, binding = 2) buffer BufTotals { ACC buf_totals[]; };
#endif

#if ARG
struct State {
    ACC v;
    int i;
};
State initial() { return State(ACC(0), -1); }
State first(ACC v, int i) { return State(v, i); }
bool is_nan(float v) { return pv_isnan(v); }
#if HAS_FLOAT64
bool is_nan(double v) { return pv_isnan(v); }
#endif
bool is_nan(int v) { return false; }
#if HAS_INT64
bool is_nan(int64_t v) { return false; }
#endif
// NaN replaces everything, and nothing but NaN replaces it.
State join(State a, State b) {
    if (b.i < 0) return a;
    if (a.i < 0) return b;
    return is_nan(b.v) || (!is_nan(a.v) && BEATS(b.v, a.v)) ? b : a;
}
#else
#define State ACC
#define initial() INIT
#define first(v, i) (v)
#define join(a, b) COMBINE(a, b)
#endif

void put(State s, int at) {
#if ARG
    buf_out[out_offset + at] = TO_OUT(s.v);
    buf_index[index_offset + at] = T_INDEX(s.i);
#else
    buf_out[out_offset + at] = TO_OUT(s);
#endif
}

#if !ROW_PER_INVOCATION
shared State shared_state[LOCAL];

// The join of the states of all invocations before this one; `all` becomes that of all.
State before(State mine, out State all) {
    int at = int(gl_LocalInvocationIndex), lane = LANE;
    shared_state[at] = mine;
    barrier();
    for (int step = 1; step < LANES; step *= 2) {
        State other = lane >= step ? shared_state[at - step * WIDTH] : initial();
        barrier();
        if (lane >= step) shared_state[at] = join(other, shared_state[at]);
        barrier();
    }
    all = shared_state[(LANES - 1) * WIDTH + SIDE];
    State made = lane > 0 ? shared_state[at - WIDTH] : initial();
    barrier();
    return made;
}
#endif

void main() {
#if TOTALS
    int all_rows = rows * parts;
#else
    int all_rows = rows;
#endif
    for (int first_row = ROW_FIRST; ROW_MORE(first_row, all_rows); first_row += ROW_STEP) {
        int i = min(first_row, all_rows - 1);
        bool live = first_row < all_rows;
#if TOTALS
        int row = i / parts, from = (i - row * parts) * part, to = min(row_length, from + part);
#else
        int row = i, from = 0, to = row_length;
#endif
        int q1 = row / size_0, q2 = q1 / size_1, q3 = q2 / size_2;
        int c0 = row - q1 * size_0, c1 = q1 - q2 * size_1, c2 = q2 - q3 * size_2;
        int x_base = x_offset + c0 * x_0 + c1 * x_1 + c2 * x_2 + q3 * x_3;
        int out_base = c0 * out_0 + c1 * out_1 + c2 * out_2 + q3 * out_3;
        State carry = initial();
#if ROW_PER_INVOCATION
        for (int j = from; j < to; j++) {
            State e = first(FROM_X(READ_X(x_base + j * x_step)), j);
            carry = j == from ? e : join(carry, e);
            put(carry, out_base + j * out_step);
        }
#else
        for (int start = from; start < to; start += ITEMS * LANES) {
            int mine = start + LANE * ITEMS;
            State s[ITEMS];
            UNROLL for (int k = 0; k < ITEMS; k++) {
                State e = initial();
                if (mine + k < to) e = first(FROM_X(READ_X(x_base + (mine + k) * x_step)), mine + k);
                s[k] = e;
                if (k > 0) s[k] = join(s[max(k - 1, 0)], s[k]);
            }
            State all;
            State left = join(carry, before(s[ITEMS - 1], all));
            UNROLL for (int k = 0; k < ITEMS; k++)
                if (live && mine + k < to) put(join(left, s[k]), out_base + (mine + k) * out_step);
            carry = join(carry, all);
        }
#endif
#if TOTALS
        if (LANE == 0) buf_totals[i] = carry;
#endif
    }
}
