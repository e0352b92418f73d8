#version 450
#extension GL_GOOGLE_include_directive : enable
// Attention of few queries over many keys, as in decoding with a cache. A workgroup takes QUERIES
// queries of HEADS heads that share keys, and all keys or a part of them. The last workgroup of a
// query joins its parts. An invocation works on ROWS of these QUERIES * HEADS rows, and reads keys and values once for
// them. Other rows have other invocations, which go through the keys at about the same time, so that
// the first cache has what they read. LANES invocations side by side read a row of K and the same row
// of V. They read KEYS rows before they use the first, so that many loads are in flight.
//
// Buffers, parameters and macros: attention_io.glslh. More macros:
//   HEADS, QUERIES  of a workgroup (1); more than 1 only with SG. HEADS divides `group`, and QUERIES S.
//   ROWS   divides HEADS * QUERIES (1); more than 1 only without SCORED and MASKED
//   LANES  a power of two (8)
//   KEYS   (4, or less for wide heads)
//   LOCAL  local size (128); an equal part for each set of ROWS, a multiple of LANES and SG
//   SG     the subgroup size, a multiple of LANES: lanes add up by subgroup shuffles; 0: they do so in
//     shared memory (0)
//   VEC8_KV  1: k and v are read 8 elements at a time. HEAD_DIM, VALUE_DIM and the strides and offsets
//     of k and v are multiples of 8, and the elements have 16 bits (0)
//   SPLIT  1: two buffers follow out. parts is float [B, Hq, S, splits, DV + 4], packed: the weighted
//     sum of the values, then the maximum of the scores and the sum of the weights (and 2 unused).
//     counters has an int for each workgroup of a part, and all are 0 before and after. A query's
//     parts without keys are left out, if a workgroup has one set.
// Shared memory, bytes: ROWS * (4 * VALUE_DIM + 8) * LOCAL / SG; without SG
// (4 * VALUE_DIM + 8) * LOCAL / LANES + 4 * KEYS * LOCAL. With SPLIT at least 3076.
// Grid: (S / QUERIES * splits, Hq / HEADS, B); splits is 1 without SPLIT
#include "core/common.glslh"
#ifndef LOCAL
#define LOCAL 128
#endif
#ifndef SG
#define SG 0
#endif
#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef HEADS
#define HEADS 1
#endif
#ifndef QUERIES
#define QUERIES 1
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef LANES
#define LANES 8
#endif
#ifndef KEYS
#define KEYS max(1, min(4, 8 / max(PIECES_K, PIECES_V)))
#endif
int current_head;
#define HEAD_INDEX current_head

#include "attention/attention_io.glslh"
#undef PARAM_DEFAULT
#define PARAM_DEFAULT 1
PARAM(26, splits)
WRITEONLY_BUFFER(OUT_BINDING, out, QUAD_OF(T_OUT))
#if SPLIT
BUFFER(OUT_BINDING + 1, parts, coherent vec4)
BUFFER(OUT_BINDING + 2, counters, coherent int)
#endif
layout(local_size_x = LOCAL, local_size_y = 1, local_size_z = 1) in;

// A piece is what an invocation reads at once: EACH elements, in QUADS vectors of 4.
#define EACH (4 + 4 * VEC8_KV)
#define QUADS (1 + VEC8_KV)
#if VEC8_KV
#define PIECE uvec4
#define READ_K(i) buf_k[(i) >> 3]
#define READ_V(i) buf_v[(i) >> 3]
#define FLOATS_K(piece, quad) FLOATS_OF_WORDS(T_K, (quad == 0 ? piece.xy : piece.zw))
#define FLOATS_V(piece, quad) FLOATS_OF_WORDS(T_V, (quad == 0 ? piece.xy : piece.zw))
#else
#define PIECE vec4
#define READ_K(i) READ4_K(i)
#define READ_V(i) READ4_V(i)
#define FLOATS_K(piece, quad) (piece)
#define FLOATS_V(piece, quad) (piece)
#endif
#define SETS (HEADS * QUERIES / ROWS)
// The invocations of a set of rows, and the keys that they work on together.
#define OWN (LOCAL / SETS)
#define SHARES (OWN / LANES)
const int ACROSS_K = HEAD_DIM / EACH, ACROSS_V = VALUE_DIM / EACH;
const int PIECES_K = (ACROSS_K + LANES - 1) / LANES, PIECES_V = (ACROSS_V + LANES - 1) / LANES;
const int AHEAD = KEYS;

// What is added up in shared memory in the end: the parts of subgroups, or of shares.
#if SG
#define PARTS (OWN / SG)
#else
#define PARTS SHARES
shared float partial_scores[AHEAD * LOCAL];
#endif
#define COLUMNS (HEADS * QUERIES * DV4)
#if SPLIT
// How many invocations share the parts of a column, and how many parts one reads ahead.
const int JOINERS = max(min(LOCAL / COLUMNS, max(128 / COLUMNS, PARTS)), 1), JOINED_PARTS = 4;
shared bool is_last;
shared vec4 sums[max(COLUMNS * PARTS, 128)];
shared vec2 ends[max(HEADS * QUERIES * PARTS, 128)];
#else
shared vec4 sums[COLUMNS * PARTS];
shared vec2 ends[HEADS * QUERIES * PARTS];
#endif

LOOPS(loop(ceil(T, SHARES), 2))
LOOPS(loop(ceil(ROWS * DV4, OWN), 2 * loop(PARTS)))
#if SPLIT
LOOPS(loop(ceil(COLUMNS, LOCAL), loop(splits)) + loop(LOCAL))

// The first part of a row of this workgroup.
int parts_of(int row, int first_head, int first_query) {
    int head = int(WORKGROUP_ID.z) * int(gl_NumWorkGroups.y) * HEADS + first_head + row % HEADS;
    return (head * S + first_query + row / HEADS) * splits * (DV4 + 1);
}
#endif

// Stores a quad of a row of this workgroup.
void store(vec4 sum, float all_weights, float top, int row, int quad, int first_head, int first_query) {
    int batch = int(WORKGROUP_ID.z), head = first_head + row % HEADS, query = first_query + row / HEADS;
    int at = (offset_o + batch * o_batch + head * o_head + query * o_row) / 4 + quad;
    buf_out[at] = QUAD_FROM(T_OUT, (sum * over_total(all_weights, top, batch, head, query)));
}

#if SPLIT
// Joins the first `used` parts, if this workgroup is the last that has one.
void join(int used, int first_head, int first_query) {
    int local = int(gl_LocalInvocationIndex);
    memoryBarrierBuffer();
    barrier();
    if (local == 0) {
        int group = int(WORKGROUP_ID.z) * int(gl_NumWorkGroups.y) + int(WORKGROUP_ID.y);
        int counter = group * (S / QUERIES) + first_query / QUERIES;
        is_last = atomicAdd(buf_counters[counter], 1) == used - 1;
        if (is_last) buf_counters[counter] = 0;
    }
    barrier();
    if (!is_last) return;
    memoryBarrierBuffer();
    for (int i = local; i < COLUMNS * JOINERS; i += LOCAL) {
        int column = i % COLUMNS, row = column / DV4, quad = column % DV4, at = parts_of(row, first_head, first_query);
        float top = UNSEEN, all_weights = 0.0;
        vec4 sum = vec4(0.0);
        for (int first = i / COLUMNS; first < used; first += JOINERS * JOINED_PARTS) {
            vec4 end[JOINED_PARTS], part[JOINED_PARTS];
            UNROLL for (int u = 0; u < JOINED_PARTS; u++) {
                int of = at + min(first + u * JOINERS, used - 1) * (DV4 + 1);
                end[u] = buf_parts[of + DV4];
                part[u] = buf_parts[of + quad];
            }
            float before = top;
            UNROLL for (int u = 0; u < JOINED_PARTS; u++) {
                if (first + u * JOINERS >= used) end[u].x = UNSEEN;
                top = max(top, end[u].x);
            }
            float shrink = weight(before, top);
            all_weights *= shrink;
            sum *= shrink;
            UNROLL for (int u = 0; u < JOINED_PARTS; u++) {
                float scale = weight(end[u].x, top);
                all_weights += scale * end[u].y;
                sum += scale * part[u];
            }
        }
        if (JOINERS == 1) {
            store(sum, all_weights, top, row, quad, first_head, first_query);
        } else {
            sums[i] = sum;
            if (quad == 0) ends[i / COLUMNS * HEADS * QUERIES + row] = vec2(top, all_weights);
        }
    }
    if (JOINERS == 1) return;
    barrier();
    if (local >= COLUMNS) return;
    int row = local / DV4;
    float top = UNSEEN, all_weights = 0.0;
    for (int j = 0; j < JOINERS; j++) top = max(top, ends[j * HEADS * QUERIES + row].x);
    vec4 sum = vec4(0.0);
    for (int j = 0; j < JOINERS; j++) {
        vec2 end = ends[j * HEADS * QUERIES + row];
        float scale = weight(end.x, top);
        all_weights += scale * end.y;
        sum += scale * sums[j * COLUMNS + local];
    }
    store(sum, all_weights, top, row, local % DV4, first_head, first_query);
}
#endif

void main() {
    int set = int(gl_LocalInvocationIndex) / OWN, id = int(gl_LocalInvocationIndex) - set * OWN;
    int first_head = int(WORKGROUP_ID.y) * HEADS, batch = int(WORKGROUP_ID.z);
#if SPLIT
    int first_query = int(WORKGROUP_ID.x) / splits, part = int(WORKGROUP_ID.x) - first_query * splits;
#else
    int first_query = int(WORKGROUP_ID.x);
#endif
    first_query *= QUERIES;
    int head[ROWS], s[ROWS];
    ivec2 seen[ROWS];
    int first = T, last = 0;
    UNROLL for (int r = 0; r < ROWS; r++) {
        int row = set * ROWS + r;
        head[r] = current_head = first_head + row % HEADS;
        s[r] = first_query + row / HEADS;
        seen[r] = keys_of(s[r]);
        first = min(first, seen[r].x);
        last = max(last, seen[r].y);
    }
    current_head = head[0];
    begin_functions();
#if SPLIT
    // The parts share the keys that a query may see, by whole steps.
    int all = splits * AHEAD * SHARES, keys = max(last - first, 0), size = (keys + all - 1) / all * AHEAD * SHARES;
#if SETS == 1
    int used = size > 0 ? (keys + size - 1) / size : 1;
    if (part >= used) return;
#else
    int used = splits;  // sets may see different keys
#endif
    first += part * size;
    last = min(last, first + size);
#endif
    int share = id / LANES, lane = id - share * LANES, key_head = first_head / group;
    int base_k = offset_k + batch * k_batch + key_head * k_head + EACH * lane;
    int base_v = offset_v + batch * v_batch + key_head * v_head + EACH * lane;

    vec4 q[ROWS * PIECES_K * QUADS], acc[ROWS * PIECES_V * QUADS];
    int base_mask[ROWS];
    float highest[ROWS], total[ROWS];
    UNROLL for (int r = 0; r < ROWS; r++) {
        int base_q = offset_q + batch * q_batch + head[r] * q_head + s[r] * q_row;
        UNROLL for (int j = 0; j < PIECES_K; j++) {
            int piece = lane + j * LANES;
            UNROLL for (int h = 0; h < QUADS; h++) {
                q[(r * PIECES_K + j) * QUADS + h] = piece < ACROSS_K ? READ4_Q(base_q + EACH * piece + 4 * h) : vec4(0.0);
            }
        }
        UNROLL for (int j = 0; j < PIECES_V * QUADS; j++) acc[r * PIECES_V * QUADS + j] = vec4(0.0);
        base_mask[r] = offset_mask + batch * mask_batch + head[r] * mask_head;
        highest[r] = UNSEEN;
        total[r] = 0.0;
    }
    for (int t0 = first; t0 < last; t0 += AHEAD * SHARES) {
#if BOUNDED
        // A loop of its own, since software devices run through both sides of a branch.
        while (t0 < last && !may_see(s[0], 1, t0, AHEAD * SHARES)) t0 += AHEAD * SHARES;
        if (t0 >= last) break;
#endif
        int rows[AHEAD];
        UNROLL for (int u = 0; u < AHEAD; u++) rows[u] = row_of(min(t0 + u * SHARES + share, last - 1));
        PIECE k[AHEAD * PIECES_K], v[AHEAD * PIECES_V];
        UNROLL for (int u = 0; u < AHEAD; u++) {
            int at = base_k + rows[u] * k_row;
            UNROLL for (int j = 0; j < PIECES_K; j++) {
                k[u * PIECES_K + j] = lane + j * LANES < ACROSS_K ? READ_K(at + EACH * j * LANES) : PIECE(0);
            }
        }
        UNROLL for (int u = 0; u < AHEAD; u++) {
            int at = base_v + rows[u] * v_row;
            UNROLL for (int j = 0; j < PIECES_V; j++) {
                v[u * PIECES_V + j] = lane + j * LANES < ACROSS_V ? READ_V(at + EACH * j * LANES) : PIECE(0);
            }
        }
        float score[ROWS * AHEAD];
        UNROLL for (int u = 0; u < AHEAD; u++) {
            float partial[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) partial[r] = 0.0;
            UNROLL for (int j = 0; j < PIECES_K; j++) {
                UNROLL for (int h = 0; h < QUADS; h++) {
                    vec4 four = FLOATS_K(k[u * PIECES_K + j], h);
                    UNROLL for (int r = 0; r < ROWS; r++) partial[r] += dot(q[(r * PIECES_K + j) * QUADS + h], four);
                }
            }
#if SG
            UNROLL for (int r = 0; r < ROWS; r++) {
                UNROLL for (int step = 0; step < LOG2_OF(LANES); step++) partial[r] += subgroupShuffleXor(partial[r], 1u << step);
                score[r * AHEAD + u] = partial[r];
            }
        }
#else
            partial_scores[u * LOCAL + id] = partial[0];
        }
        barrier();
        UNROLL for (int u = 0; u < AHEAD; u++) {
            score[u] = 0.0;
            UNROLL for (int i = 0; i < LANES; i++) score[u] += partial_scores[u * LOCAL + share * LANES + i];
        }
        barrier();
#endif
        float top[ROWS];
        UNROLL for (int r = 0; r < ROWS; r++) {
            top[r] = highest[r];
            current_head = head[r];
            UNROLL for (int u = 0; u < AHEAD; u++) {
                int t = t0 + u * SHARES + share;
                score[r * AHEAD + u] = t < last ? masked_score(score[r * AHEAD + u], base_mask[r], s[r], t, seen[r]) : UNSEEN;
                top[r] = max(top[r], score[r * AHEAD + u]);
            }
            float shrink = weight(highest[r], top[r]);
            highest[r] = top[r];
            total[r] *= shrink;
            UNROLL for (int j = 0; j < PIECES_V * QUADS; j++) acc[r * PIECES_V * QUADS + j] *= shrink;
        }
        UNROLL for (int u = 0; u < AHEAD; u++) {
            float p[ROWS];
            UNROLL for (int r = 0; r < ROWS; r++) {
                p[r] = weight(score[r * AHEAD + u], top[r]);
                total[r] += p[r];
            }
            UNROLL for (int j = 0; j < PIECES_V; j++) {
                UNROLL for (int h = 0; h < QUADS; h++) {
                    vec4 four = FLOATS_V(v[u * PIECES_V + j], h);
                    UNROLL for (int r = 0; r < ROWS; r++) acc[(r * PIECES_V + j) * QUADS + h] += p[r] * four;
                }
            }
        }
    }

#if SG
    // The shares of a subgroup.
    UNROLL for (int r = 0; r < ROWS; r++) {
        float most = highest[r];
        UNROLL for (int step = 0; step < LOG2_OF(SG / LANES); step++) most = max(most, subgroupShuffleXor(most, uint(LANES) << step));
        float shrunk = weight(highest[r], most);
        highest[r] = most;
        total[r] *= shrunk;
        UNROLL for (int j = 0; j < PIECES_V * QUADS; j++) acc[r * PIECES_V * QUADS + j] *= shrunk;
        UNROLL for (int step = 0; step < LOG2_OF(SG / LANES); step++) {
            total[r] += subgroupShuffleXor(total[r], uint(LANES) << step);
            UNROLL for (int j = 0; j < PIECES_V * QUADS; j++) {
                acc[r * PIECES_V * QUADS + j] += subgroupShuffleXor(acc[r * PIECES_V * QUADS + j], uint(LANES) << step);
            }
        }
    }
    int own = id / SG;
    bool stores = id % SG < LANES;
#else
    int own = share;
    bool stores = true;
#endif
    if (stores) {
        UNROLL for (int r = 0; r < ROWS; r++) {
            int part_of_row = (set * ROWS + r) * PARTS + own;
            if (lane == 0) ends[part_of_row] = vec2(highest[r], total[r]);
            UNROLL for (int j = 0; j < PIECES_V; j++) {
                int piece = lane + j * LANES;
                UNROLL for (int h = 0; h < QUADS; h++) {
                    if (piece < ACROSS_V) sums[part_of_row * DV4 + piece * QUADS + h] = acc[(r * PIECES_V + j) * QUADS + h];
                }
            }
        }
    }
    barrier();

    // The parts of each row.
    for (int i = id; i < ROWS * DV4; i += OWN) {
        int r = i / DV4, quad = i - r * DV4, row = set * ROWS + r, from = row * PARTS;
        float top = UNSEEN, all_weights = 0.0;
        for (int p = 0; p < PARTS; p++) top = max(top, ends[from + p].x);
        vec4 sum = vec4(0.0);
        for (int p = 0; p < PARTS; p++) {
            float scale = weight(ends[from + p].x, top);
            all_weights += scale * ends[from + p].y;
            sum += scale * sums[(from + p) * DV4 + quad];
        }
#if SPLIT
        if (used > 1) {
            int at = parts_of(row, first_head, first_query) + part * (DV4 + 1);
            if (quad == 0) buf_parts[at + DV4] = vec4(top, all_weights, 0.0, 0.0);
            buf_parts[at + quad] = sum;
            continue;
        }
#endif
        store(sum, all_weights, top, row, quad, first_head, first_query);
    }
#if SPLIT
    if (used > 1) join(used, first_head, first_query);
#endif
}
