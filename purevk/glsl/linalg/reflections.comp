#version 450
#extension GL_GOOGLE_include_directive : enable
// Householder's reflections of matrices of any size, as LAPACK's geqrf: R with the vectors of the
// reflections below its diagonal, and their factors.
//
// A column is a row here, so that neighbouring invocations read neighbouring elements: x and out are
// [matrices, columns, rows]. Workgroups have `part` rows of a column each. The dispatch is repeated
// `count` + 2 times. In iteration k
//   columns from k on  apply reflection k - 1, which needs the sums of all parts of the iteration
//                      before, and multiply with column k, which makes the sums of the next one.
//                      Column k is final then and goes to `out`; the others are in `work`
//   column k - 1       notes its reflection
//   column k - 2       is scaled: no other workgroup reads it from here on
// So each iteration walks the rows once, and no workgroup reads what another one writes.
//
// Columns are divided by the power of 2 that is about their largest element, `top`. That changes no
// digit of the vectors, and squares stay in range.
//
// Buffers: x, top [matrices, columns], work as x, sums [2, matrices, columns, parts, 2], heads
// [matrices, count, 2]: the diagonal, and what a vector is multiplied with; out, factors
// [matrices, count].
// Macros:
//   T      element type, float or double; HAS_FLOAT64 for the latter
//   LOCAL  invocations of a workgroup, a multiple of 8
// Grid: a workgroup for each part of each column of each matrix
#include "core/common.glslh"
#include "core/math.glslh"
#include "linalg/reflection.glslh"

#ifndef T
#define T float
#endif
#ifndef LOCAL
#define LOCAL 64
#endif
#define LANES (LOCAL / 8)

PARAM(0, rows)
PARAM(1, columns)
PARAM(2, count)
PARAM(3, matrices)
PARAM(4, parts)
PARAM(5, part)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(6, x_offset)
PARAM(7, top_offset)
PARAM(8, out_offset)
PARAM(9, factors_offset)
PARAM(10, iteration)
READONLY_BUFFER(0, x, T)
READONLY_BUFFER(1, top, T)
BUFFER(2, work, T)
BUFFER(3, sums, T)
BUFFER(4, heads, T)
BUFFER(5, out, T)
WRITEONLY_BUFFER(6, factors, T)

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

shared T dots[LOCAL], firsts[LOCAL];

REFLECTION(Reflection, T)

// The sums of all parts of a column: of the products below the diagonal, and the element on it.
T sum_below, diagonal;
void add_parts(int at) {
    sum_below = T(0.0);
    diagonal = T(0.0);
    for (int p = 0; p < parts; p++) {
        sum_below += buf_sums[2 * (at + p)];
        diagonal += buf_sums[2 * (at + p) + 1];
    }
}

LOOPS(3 * loop(parts) + loop(ceil(part, LOCAL)) + loop(LOCAL))
void main() {
    int number = int(WORKGROUP_ID.y * gl_NumWorkGroups.x + WORKGROUP_ID.x), id = int(gl_LocalInvocationIndex);
    int p = number % parts, j = number / parts % columns, matrix = number / parts / columns, k = iteration;
    if (matrix >= matrices || j < k - 2 || (k > count && j > k - 2)) return;
    int own = (matrix * columns + j) * rows, first = p * part, end = min(first + part, rows);
    if (j == k - 2) {
        int at = matrix * count + j;
        T scale = buf_heads[2 * at + 1], back = power_of_2(buf_top[top_offset + matrix * columns + j], 1);
        for (int i = first + id; i < end; i += LOCAL) {
            T v = buf_out[out_offset + own + i];
            buf_out[out_offset + own + i] = i < j ? v * back : i == j ? buf_heads[2 * at] * back : v * scale;
        }
        return;
    }
    int before = k % 2 == 0 ? matrices * columns * parts : 0, now = matrices * columns * parts - before;
    T own_times = T(0.0), pivot_times = T(0.0), scale = T(0.0);
    if (k > 0) {
        add_parts(before + (matrix * columns + k - 1) * parts);
        Reflection r = reflection_of(diagonal, sum_below);
        if (j == k - 1) {
            if (p == 0 && id == 0) {
                int at = matrix * count + j;
                buf_heads[2 * at] = r.diagonal;
                buf_heads[2 * at + 1] = r.scale;
                buf_factors[factors_offset + at] = r.factor;
            }
            return;
        }
        scale = r.scale;
        if (r.factor != T(0.0)) {
            add_parts(before + (matrix * columns + j) * parts);
            own_times = r.factor * (diagonal + scale * sum_below);
            add_parts(before + (matrix * columns + k) * parts);
            pivot_times = r.factor * (diagonal + scale * sum_below);
        }
    }
    int pivot = (matrix * columns + k) * rows, vector = out_offset + pivot - rows;
    int tops = top_offset + matrix * columns;
    T own_down = power_of_2(buf_top[tops + j], -1), pivot_down = power_of_2(buf_top[tops + k], -1);
    T back = k == count ? power_of_2(buf_top[tops + j], 1) : T(1.0);
    T dot = T(0.0), head = T(0.0);
    for (int i = first + id; i < end; i += LOCAL) {
        T a, b;
        if (k == 0) {
            a = buf_x[x_offset + own + i] * own_down;
            b = buf_x[x_offset + pivot + i] * pivot_down;
        } else {
            a = buf_work[own + i];
            b = buf_work[pivot + i];
            if (i >= k - 1) {
                T v = i == k - 1 ? T(1.0) : buf_out[vector + i] * scale;
                a -= own_times * v;
                b -= pivot_times * v;
            }
        }
        if (j == k || k == count) {
            buf_out[out_offset + own + i] = a * back;
        } else {
            buf_work[own + i] = a;
        }
        if (i == k) head = a;
        if (i > k) dot += a * b;
    }
    dots[id] = dot;
    firsts[id] = head;
    barrier();
    if (id < LANES) {
        UNROLL for (int e = 1; e < 8; e++) {
            dot += dots[id + e * LANES];
            head += firsts[id + e * LANES];
        }
        dots[id] = dot;
        firsts[id] = head;
    }
    barrier();
    if (id == 0) {
        for (int e = 1; e < LANES; e++) {
            dot += dots[e];
            head += firsts[e];
        }
        int at = 2 * (now + (matrix * columns + j) * parts + p);
        buf_sums[at] = dot;
        buf_sums[at + 1] = head;
    }
}
