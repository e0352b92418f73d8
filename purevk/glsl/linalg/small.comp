#version 450
#extension GL_GOOGLE_include_directive : enable
// Factors of small matrices, and solutions by them. An invocation takes a matrix, or (REFLECT, SOLVE) a
// column of the right side.
//
// FORM
//   0  LU: R = L and U of A [rows, columns] in one matrix, R1 the row (from 1 on) that each row is
//      swapped with, R2 the first column without a pivot (from 1 on), or 0
//   1  QR: R with Householder's vectors below its diagonal, of A [rows, columns]; R1 their factors
//   2  REFLECT: R = the product of `count` reflections V (below its diagonal), TAU with X [rows, ...]
//   3  Cholesky: R = L of A [rows, rows], R1 the first minor that is not positive (from 1 on), or 0
//   4  SOLVE: R = the solution of A R = B for one triangle of A [rows, rows]
// FORWARD  REFLECT: from the first reflection on; SOLVE: from the first row on, for a lower triangle
// UNIT     SOLVE: 1: the diagonal of A has ones
// X_AT(i, j), X_SET(i, j, v)  an element of the matrix X of this invocation; X_AT(i) of a vector
// COLUMN   the column of this invocation
// Otherwise as elementwise/map.comp.
#include "elementwise/map.glslh"
#include "linalg/reflection.glslh"
#ifndef FORM
#define FORM 0
#endif
#ifndef FORWARD
#define FORWARD 1
#endif
#ifndef UNIT
#define UNIT 0
#endif
#ifndef COLUMN
#define COLUMN 0
#endif
#pragma purevk macro A_AT
#pragma purevk macro R_AT
#pragma purevk macro R_SET
#pragma purevk macro R1_SET
#pragma purevk macro R2_SET
#pragma purevk macro TAU_AT
#pragma purevk macro V_AT
#pragma purevk macro B_AT
#ifndef R_SET
SPEC_CONSTANT(0, rows)
SPEC_CONSTANT(1, columns)
#define A_AT(i, j) X(i + j)
#define R_AT(i, j) X(i + j)
#define R_SET(i, j, v) buf_r[i + j] = v
#define R1_SET(i, v)
#define R2_SET(v)
#endif
#ifndef X_AT
#define X_AT(i, j) X(i + j)
#endif

#if FORM == 1
REFLECTION(Reflection, NUMBER)
#endif

#if FORM == 0
LOOPS(loop(rows, loop(columns)) + loop(columns, loop(rows) + loop(columns) + loop(rows, loop(columns))))
#elif FORM == 1
LOOPS(loop(rows, loop(columns)) + loop(columns, 3 * loop(rows) + loop(columns, 2 * loop(rows))))
#elif FORM == 2
LOOPS(loop(rows) + loop(count, 2 * loop(rows)))
#elif FORM == 3
LOOPS(loop(rows, 2 * loop(rows) + loop(rows, loop(rows))))
#else
LOOPS(loop(rows, loop(rows)))
#endif

void main() {
    uint id = MAP_ID;
    if (MAP_HAS_WORK(id)) {
        COORDINATES
#if FORM == 0
        for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j++) R_SET(i, j, A_AT(i, j));
        int info = 0;
        for (int k = 0; k < min(rows, columns); k++) {
            int p = k;
            for (int i = k + 1; i < rows; i++) if (abs(R_AT(i, k)) > abs(R_AT(p, k))) p = i;
            R1_SET(k, p + 1);
            if (p != k) for (int j = 0; j < columns; j++) {
                NUMBER t = R_AT(k, j);
                R_SET(k, j, R_AT(p, j));
                R_SET(p, j, t);
            }
            NUMBER d = R_AT(k, k);
            if (d == NUMBER(0.0)) {
                if (info == 0) info = k + 1;
                continue;
            }
            for (int i = k + 1; i < rows; i++) {
                NUMBER f = R_AT(i, k) / d;
                R_SET(i, k, f);
                for (int j = k + 1; j < columns; j++) R_SET(i, j, R_AT(i, j) - f * R_AT(k, j));
            }
        }
        R2_SET(info);
#elif FORM == 1
        for (int i = 0; i < rows; i++) for (int j = 0; j < columns; j++) R_SET(i, j, A_AT(i, j));
        for (int k = 0; k < min(rows, columns); k++) {
            NUMBER top = NUMBER(0.0), below = NUMBER(0.0);
            for (int i = k; i < rows; i++) top = max(top, abs(R_AT(i, k)));
            NUMBER down = power_of_2(top, -1);
            for (int i = k + 1; i < rows; i++) below += (R_AT(i, k) * down) * (R_AT(i, k) * down);
            Reflection r = reflection_of(R_AT(k, k) * down, below);
            if (r.factor != NUMBER(0.0)) {
                for (int i = k + 1; i < rows; i++) R_SET(i, k, R_AT(i, k) * down * r.scale);
                R_SET(k, k, r.diagonal * power_of_2(top, 1));
                for (int j = k + 1; j < columns; j++) {
                    NUMBER s = R_AT(k, j);
                    for (int i = k + 1; i < rows; i++) s += R_AT(i, k) * R_AT(i, j);
                    s *= r.factor;
                    R_SET(k, j, R_AT(k, j) - s);
                    for (int i = k + 1; i < rows; i++) R_SET(i, j, R_AT(i, j) - s * R_AT(i, k));
                }
            }
            R1_SET(k, r.factor);
        }
#elif FORM == 2
        for (int i = 0; i < rows; i++) R_SET(i, COLUMN, X_AT(i, COLUMN));
#if FORWARD
        for (int k = 0; k < count; k++) {
#else
        for (int k = count - 1; k >= 0; k--) {
#endif
            NUMBER s = R_AT(k, COLUMN);
            for (int i = k + 1; i < rows; i++) s += V_AT(i, k) * R_AT(i, COLUMN);
            s *= TAU_AT(k);
            R_SET(k, COLUMN, R_AT(k, COLUMN) - s);
            for (int i = k + 1; i < rows; i++) R_SET(i, COLUMN, R_AT(i, COLUMN) - s * V_AT(i, k));
        }
#elif FORM == 3
        int info = 0;
        for (int j = 0; j < rows; j++) {
            NUMBER d = A_AT(j, j);
            for (int k = 0; k < j; k++) d -= R_AT(j, k) * R_AT(j, k);
            if (!(d > NUMBER(0.0)) && info == 0) info = j + 1;
            d = sqrt(d);
            R_SET(j, j, d);
            for (int i = 0; i < j; i++) R_SET(i, j, NUMBER(0.0));
            for (int i = j + 1; i < rows; i++) {
                NUMBER sum = A_AT(i, j);
                for (int k = 0; k < j; k++) sum -= R_AT(i, k) * R_AT(j, k);
                R_SET(i, j, sum / d);
            }
        }
        R1_SET(info);
#else
#if FORWARD
        for (int i = 0; i < rows; i++) {
            NUMBER sum = B_AT(i, COLUMN);
            for (int j = 0; j < i; j++) sum -= A_AT(i, j) * R_AT(j, COLUMN);
#else
        for (int i = rows - 1; i >= 0; i--) {
            NUMBER sum = B_AT(i, COLUMN);
            for (int j = i + 1; j < rows; j++) sum -= A_AT(i, j) * R_AT(j, COLUMN);
#endif
#if UNIT
            R_SET(i, COLUMN, sum);
#else
            R_SET(i, COLUMN, sum / A_AT(i, i));
#endif
        }
#endif
    }
}
