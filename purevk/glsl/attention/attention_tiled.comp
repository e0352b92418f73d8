#version 450
#extension GL_GOOGLE_include_directive : enable
// softmax(scale * q k^T + mask) v in one pass with a running maximum, in float, by tiles in shared
// memory: for GPUs.
//
// Buffers, parameters and macros: attention_io.glslh. More macros:
//   QUERIES  queries per workgroup (32)
//   KEYS  keys per step (32), a multiple of 4 and of LANES
//   LANES  invocations that share a query (16), a power of two
//   GROUPS  groups of LANES invocations (8); QUERIES is a multiple. Each group has QUERIES / GROUPS
//     queries.
//   PART  columns of keys, and then of values, that are in shared memory at a time, a multiple of
//     4 * LANES: for heads of which a step would not fit. 0: all columns of both (0)
//   SHUFFLE  1: lanes of a group are neighbours in one subgroup and exchange maxima by shuffles.
//     The subgroup size is then a multiple of LANES, and the local size one of the subgroup size.
//     (0)
// Local size LANES * GROUPS.
// Shared memory, bytes: 4 * (QUERIES * (HEAD_DIM + 4) + KEYS * (HEAD_DIM + 4)
//   + KEYS * (VALUE_DIM + 4) + QUERIES * (KEYS + 4)), and that of steps.glslh; with PART, KEYS * (PART
//   + 4) in place of those of keys and values.
// Grid: (ceil(S / QUERIES), Hq, B)
#include "core/common.glslh"
#ifndef QUERIES
#define QUERIES 32
#endif
#ifndef KEYS
#define KEYS 32
#endif
#ifndef LANES
#define LANES 16
#endif
#ifndef GROUPS
#define GROUPS 8
#endif
#ifndef PART
#define PART 0
#endif
#ifndef SHUFFLE
#define SHUFFLE 0
#endif

#include "attention/attention_io.glslh"
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
#define LOCAL (LANES * GROUPS)
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

#include "attention/steps.glslh"

// Rows of an odd number of vec4, so that neighbours are in different banks.
#define QUERY_LINE (D4 + 1)
#if PART
#define K_PART4 (PART / 4)
#define V_PART4 (PART / 4)
#else
#define K_PART4 D4
#define V_PART4 DV4
#endif
#define K_PARTS ((D4 + K_PART4 - 1) / K_PART4)
#define V_PARTS ((DV4 + V_PART4 - 1) / V_PART4)
#define KEY_LINE (K_PART4 | 1)
#define VALUE_LINE (V_PART4 | 1)
#define KEYS4 (KEYS / 4)
#define SCORE_LINE (KEYS4 + 1)
#define MY_QUERIES (QUERIES / GROUPS)
#define MY_KEYS (KEYS / LANES)
// Where a row of values is narrower than the lanes, these share the keys.
#if PART == 0 && DV4 < LANES && LANES % DV4 == 0 && SHUFFLE
#define COLUMNS DV4
#else
#define COLUMNS LANES
#endif
#define SHARES (LANES / COLUMNS)
#define MY_VALUES ((V_PART4 + COLUMNS - 1) / COLUMNS)  // of a part

shared vec4 tile_q[QUERIES * QUERY_LINE];
#if PART
shared vec4 tile[KEYS * KEY_LINE];
#define tile_k tile
#define tile_v tile
#else
shared vec4 tile_k[KEYS * KEY_LINE];
shared vec4 tile_v[KEYS * VALUE_LINE];
#endif
shared vec4 tile_s[QUERIES * SCORE_LINE];

// Waits for the lanes of one group to have written their scores.
void group_barrier() {
#if SHUFFLE
    subgroupMemoryBarrierShared();
    subgroupBarrier();
#else
    barrier();
#endif
}

// Keys and values of the next step, or of the next part, are read to registers while the present ones
// are used.
#define K_SLOTS ((KEYS * K_PART4 + LOCAL - 1) / LOCAL)
#define V_SLOTS ((KEYS * V_PART4 + LOCAL - 1) / LOCAL)
#if PART
vec4 next_part[K_SLOTS];
#define next_k next_part
#define next_v next_part
#else
vec4 next_k[K_SLOTS], next_v[V_SLOTS];
#endif

void fetch_keys(int base_k, int t0, int part) {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int i = 0; i < K_SLOTS; i++) {
        int at = id + i * LOCAL, t = at / K_PART4, d = part * K_PART4 + at - t * K_PART4;
        next_k[i] = READ4_K(base_k + row_of(min(t0 + t, T - 1)) * k_row + 4 * min(d, D4 - 1));
    }
}

void fetch_values(int base_v, int t0, int part) {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int i = 0; i < V_SLOTS; i++) {
        int at = id + i * LOCAL, t = at / V_PART4, d = part * V_PART4 + at - t * V_PART4;
        next_v[i] = READ4_V(base_v + row_of(min(t0 + t, T - 1)) * v_row + 4 * min(d, DV4 - 1));
    }
}

void put_keys() {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int i = 0; i < K_SLOTS; i++) {
        int at = id + i * LOCAL, t = at / K_PART4;
        if (at < KEYS * K_PART4) tile_k[t * KEY_LINE + at - t * K_PART4] = next_k[i];
    }
}

void put_values() {
    int id = int(gl_LocalInvocationIndex);
    UNROLL for (int i = 0; i < V_SLOTS; i++) {
        int at = id + i * LOCAL, t = at / V_PART4;
        if (at < KEYS * V_PART4) tile_v[t * VALUE_LINE + at - t * V_PART4] = next_v[i];
    }
}

LOOPS(loop(ceil(QUERIES * D4, LOCAL)) + STEP_KEYS_LOOPS + NEXT_STEP_LOOPS)
LOOPS(loop(ceil(T, KEYS), NEXT_STEP_LOOPS_EACH + loop(K_PARTS, loop(K_PART4)) + MY_QUERIES * loop(KEYS4) + V_PARTS * loop(ceil(KEYS4, SHARES))))

void main() {
    begin_functions();
    int head = int(WORKGROUP_ID.y), batch = int(WORKGROUP_ID.z), key_head = head / group;
    int base_q = offset_q + batch * q_batch + head * q_head;
    int base_k = offset_k + batch * k_batch + key_head * k_head;
    int base_v = offset_v + batch * v_batch + key_head * v_head;
    int base_o = offset_o + batch * o_batch + head * o_head;
    int base_mask = offset_mask + batch * mask_batch + head * mask_head;
    int id = int(gl_LocalInvocationIndex), lane = id % LANES;
    int row0 = int(WORKGROUP_ID.x) * QUERIES, mine = id / LANES * MY_QUERIES;
    int column = lane % COLUMNS, share = lane / COLUMNS;

    for (int i = id; i < QUERIES * D4; i += LOCAL) {
        int r = i / D4, d = i - r * D4;
        tile_q[r * QUERY_LINE + d] = READ4_Q(base_q + min(row0 + r, S - 1) * q_row + 4 * d);
    }
    vec4 acc[MY_QUERIES][V_PARTS * MY_VALUES];
    float highest[MY_QUERIES], total[MY_QUERIES];
    UNROLL for (int r = 0; r < MY_QUERIES; r++) {
        UNROLL for (int d = 0; d < V_PARTS * MY_VALUES; d++) acc[r][d] = vec4(0.0);
        highest[r] = UNSEEN;
        total[r] = 0.0;
    }
    ivec2 seen[MY_QUERIES];
    UNROLL for (int r = 0; r < MY_QUERIES; r++) seen[r] = keys_of(row0 + mine + r);
    ivec2 ends = step_keys(row0);
    int keys = ends.y, next = next_step(ends.x, keys, row0);
    if (next < keys) {
        fetch_keys(base_k, next, 0);
#if !PART
        fetch_values(base_v, next, 0);
#endif
    }
    while (next < keys) {
        int t0 = next;
#if PART
        next = next_step(t0 + KEYS, keys, row0);
#else
        barrier();
        put_keys();
        put_values();
        barrier();
        next = next_step(t0 + KEYS, keys, row0);
        if (next < keys) {
            fetch_keys(base_k, next, 0);
            fetch_values(base_v, next, 0);
        }
#endif
        float score[MY_QUERIES][MY_KEYS];
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            UNROLL for (int c = 0; c < MY_KEYS; c++) score[r][c] = 0.0;
        }
        for (int part = 0; part < K_PARTS; part++) {
            int first = part * K_PART4;
#if PART
            barrier();
            put_keys();
            barrier();
            if (part + 1 < K_PARTS) fetch_keys(base_k, t0, part + 1);
            else fetch_values(base_v, t0, 0);
#endif
            for (int d = first; d < min(first + K_PART4, D4); d++) {
                vec4 key[MY_KEYS];
                UNROLL for (int c = 0; c < MY_KEYS; c++) key[c] = tile_k[(lane + c * LANES) * KEY_LINE + d - first];
                UNROLL for (int r = 0; r < MY_QUERIES; r++) {
                    vec4 query = tile_q[(mine + r) * QUERY_LINE + d];
                    UNROLL for (int c = 0; c < MY_KEYS; c++) score[r][c] += dot(query, key[c]);
                }
            }
        }
        float top[MY_QUERIES];
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            top[r] = highest[r];
            UNROLL for (int c = 0; c < MY_KEYS; c++) {
                int t = lane + c * LANES;
                score[r][c] = masked_score(score[r][c], base_mask, row0 + mine + r, t0 + t, seen[r]);
#if SHUFFLE
                top[r] = max(top[r], score[r][c]);
#else
                tile_s[(mine + r) * SCORE_LINE + (t >> 2)][t & 3] = score[r][c];
#endif
            }
        }
#if SHUFFLE
        UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) {
            UNROLL for (int r = 0; r < MY_QUERIES; r++) top[r] = max(top[r], subgroupShuffleXor(top[r], uint(LANES / 2 >> step)));
        }
#else
        barrier();
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            vec4 best = vec4(top[r]);
            for (int t = 0; t < KEYS4; t++) best = max(best, tile_s[(mine + r) * SCORE_LINE + t]);
            top[r] = max(max(best.x, best.y), max(best.z, best.w));
        }
        barrier();
#endif
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            float shrink = weight(highest[r], top[r]);
            highest[r] = top[r];
            total[r] *= shrink;
            UNROLL for (int d = 0; d < V_PARTS * MY_VALUES; d++) acc[r][d] *= shrink;
            UNROLL for (int c = 0; c < MY_KEYS; c++) {
                int t = lane + c * LANES;
                tile_s[(mine + r) * SCORE_LINE + (t >> 2)][t & 3] = weight(score[r][c], top[r]);
            }
        }
        group_barrier();
        UNROLL for (int part = 0; part < V_PARTS; part++) {
#if PART
            barrier();
            put_values();
            barrier();
            if (part + 1 < V_PARTS) fetch_values(base_v, t0, part + 1);
            else if (next < keys) fetch_keys(base_k, next, 0);
#endif
            for (int t = share; t < KEYS4; t += SHARES) {
                vec4 p[MY_QUERIES];
                UNROLL for (int r = 0; r < MY_QUERIES; r++) {
                    p[r] = tile_s[(mine + r) * SCORE_LINE + t];
                    if (part == 0) total[r] += p[r].x + p[r].y + p[r].z + p[r].w;
                }
                UNROLL for (int c = 0; c < 4; c++) {
                    UNROLL for (int d = 0; d < MY_VALUES; d++) {
                        vec4 value = tile_v[(4 * t + c) * VALUE_LINE + min(column + d * COLUMNS, V_PART4 - 1)];
                        UNROLL for (int r = 0; r < MY_QUERIES; r++) acc[r][part * MY_VALUES + d] += p[r][c] * value;
                    }
                }
            }
        }
    }
#if SHARES > 1
    UNROLL for (int step = 0; step < LOG2_OF(LANES / COLUMNS); step++) {
        UNROLL for (int r = 0; r < MY_QUERIES; r++) {
            uint other = uint(LANES / 2 >> step);
            total[r] += subgroupShuffleXor(total[r], other);
            UNROLL for (int d = 0; d < V_PARTS * MY_VALUES; d++) acc[r][d] += subgroupShuffleXor(acc[r][d], other);
        }
    }
#endif
    UNROLL for (int r = 0; r < MY_QUERIES; r++) {
        int row = row0 + mine + r;
        float over = over_total(total[r], highest[r], int(WORKGROUP_ID.z), int(WORKGROUP_ID.y), row);
        UNROLL for (int d = 0; d < V_PARTS * MY_VALUES; d++) {
            int c = d / MY_VALUES * V_PART4 + column + d % MY_VALUES * COLUMNS;
            if (share == 0 && row < S && c < DV4) {
                buf_out[(base_o + row * o_row) / 4 + c] = QUAD_FROM(T_OUT, acc[r][d] * over);
            }
        }
    }
}
