#version 450
#extension GL_GOOGLE_include_directive : enable
// Orthonormal vectors from orthogonal ones: those that are not short are scaled to length 1, and
// what is left of `count` vectors is completed with unit vectors that are made orthogonal to them.
//
// Vectors are rows: x is [matrices, given, size], lengths [matrices, given], out
// [matrices, count, size]. One workgroup has a matrix, and an invocation the same elements of all
// vectors.
//
// Buffers: x, lengths, out.
// Macros:
//   T       element type, float or double; HAS_FLOAT64 for the latter
//   LOCAL   invocations of a workgroup, a power of 2
//   EPSILON vectors up to this, as a part of the longest, are short
// Grid: a workgroup for each matrix
#include "core/common.glslh"
#include "core/math.glslh"

#ifndef T
#define T float
#endif
#ifndef LOCAL
#define LOCAL 64
#endif
#ifndef EPSILON
#define EPSILON 1.1920929e-07
#endif

PARAM(0, size)
PARAM(1, given)
PARAM(2, count)
PARAM(3, matrices)
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 0
PARAM(4, x_offset)
PARAM(5, lengths_offset)
PARAM(6, out_offset)
READONLY_BUFFER(0, x, T)
READONLY_BUFFER(1, lengths, T)
BUFFER(2, out, T)

layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

#define CHUNK 8  // vectors that are projected on together
shared T sums[CHUNK * LOCAL];
shared T found[LOCAL];
shared int found_at[LOCAL];

// The sums over all invocations of CHUNK numbers each, in sums[e * LOCAL].
void add_up(T v[CHUNK]) {
    int id = int(gl_LocalInvocationIndex);
    barrier();
    UNROLL for (int e = 0; e < CHUNK; e++) sums[e * LOCAL + id] = v[e];
    for (int half_of = LOCAL / 2; half_of > 0; half_of /= 2) {
        barrier();
        if (id < half_of) {
            UNROLL for (int e = 0; e < CHUNK; e++) sums[e * LOCAL + id] += sums[e * LOCAL + id + half_of];
        }
    }
    barrier();
}

bool is_short(T length, T longest) {
    return !(length > T(EPSILON) * longest) || !(length > T(0.0));
}

// Takes from vector `at` what it has in common with the finished ones, and scales it to length 1.
void make_orthogonal(int base, int at) {
    int id = int(gl_LocalInvocationIndex), own = base + at * size;
    for (int c0 = 0; c0 < at; c0 += CHUNK) {
        T v[CHUNK];
        UNROLL for (int e = 0; e < CHUNK; e++) v[e] = T(0.0);
        for (int i = id; i < size; i += LOCAL) {
            UNROLL for (int e = 0; e < CHUNK; e++) {
                if (c0 + e < at) v[e] += buf_out[base + (c0 + e) * size + i] * buf_out[own + i];
            }
        }
        add_up(v);
        for (int i = id; i < size; i += LOCAL) {
            T rest = buf_out[own + i];
            UNROLL for (int e = 0; e < CHUNK; e++) {
                if (c0 + e < at) rest -= sums[e * LOCAL] * buf_out[base + (c0 + e) * size + i];
            }
            buf_out[own + i] = rest;
        }
    }
    T v[CHUNK];
    UNROLL for (int e = 0; e < CHUNK; e++) v[e] = T(0.0);
    for (int i = id; i < size; i += LOCAL) v[0] += buf_out[own + i] * buf_out[own + i];
    add_up(v);
    T over = T(1.0) / sqrt(sums[0]);
    for (int i = id; i < size; i += LOCAL) buf_out[own + i] *= over;
}

#define LINES loop(ceil(size, LOCAL))
#define ADD_LOOPS loop(log2(LOCAL))
#define ORTHOGONAL_LOOPS (loop(ceil(count, CHUNK), 2 * LINES + ADD_LOOPS) + 2 * LINES + ADD_LOOPS)
LOOPS(loop(count, LINES + loop(ceil(size, LOCAL), loop(count)) + ADD_LOOPS + 2 * ORTHOGONAL_LOOPS))

void main() {
    int id = int(gl_LocalInvocationIndex);
    int matrix = int(gl_WorkGroupID.y * gl_NumWorkGroups.x + gl_WorkGroupID.x);
    if (matrix >= matrices) return;
    int from = x_offset + matrix * given * size, base = out_offset + matrix * count * size;
    int first = lengths_offset + matrix * given;
    // Lengths are sorted, so short vectors are behind all others.
    T longest = given > 0 ? buf_lengths[first] : T(0.0);
    int finished = 0;
    for (; finished < min(given, count); finished++) {
        T length = buf_lengths[first + finished];
        if (is_short(length, longest)) break;
        for (int i = id; i < size; i += LOCAL) {
            buf_out[base + finished * size + i] = buf_x[from + finished * size + i] / length;
        }
    }
    for (; finished < count; finished++) {
        // The unit vector with the least in the span of the finished ones.
        T best = T(2.0);
        int best_at = 0;
        for (int i = id; i < size; i += LOCAL) {
            T inside = T(0.0);
            for (int c = 0; c < finished; c++) {
                T u = buf_out[base + c * size + i];
                inside += u * u;
            }
            if (inside < best) {
                best = inside;
                best_at = i;
            }
        }
        barrier();
        found[id] = best;
        found_at[id] = best_at;
        for (int half_of = LOCAL / 2; half_of > 0; half_of /= 2) {
            barrier();
            if (id < half_of && found[id + half_of] < found[id]) {
                found[id] = found[id + half_of];
                found_at[id] = found_at[id + half_of];
            }
        }
        barrier();
        int unit = found_at[0];
        for (int i = id; i < size; i += LOCAL) buf_out[base + finished * size + i] = i == unit ? T(1.0) : T(0.0);
        // Twice is enough for vectors that are orthogonal to the precision of the type.
        make_orthogonal(base, finished);
        make_orthogonal(base, finished);
    }
}
