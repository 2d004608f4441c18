// Cholesky factors of a batch of diag(delta) + sum_c k_c k_c' on one sparse pattern, and solves with them.
//
// Eight samples stand side by side in a vector, so every number below is eight, and what happens to one of them does
// not depend on the others. A factor is kept by columns in elimination order, the inverse of the pivot first.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

using Index = std::int64_t;
constexpr Index LANES = 8;

extern "C" {
struct Symbolic {  // the pattern of a factor; see `_Symbolic` in simplicial.py
    Index size, entries, products;
    const Index *order;               // place -> node
    const Index *start, *row;         // of each column: where it begins, and the place of every entry
    const Index *from, *update, *end; // column j is changed by the entries update[u] to end[u], from[j] <= u < from[j + 1]
    const Index *first, *second, *target;  // products of two nonzeros, and the entry that they are added to
};

struct Jacobian {  // nonzeros at (row, col) of a matrix (rows, columns)
    Index rows, columns, nonzeros;
    const Index *row, *col;
};
}

namespace {

template <class T> struct Vector {
    typedef T type __attribute__((vector_size(LANES * sizeof(T))));
};

// Eight samples of an array; the last sample stands for those beyond the batch.
template <class T> struct Group {
    using V = typename Vector<T>::type;
    Index lane[LANES], count;

    Group(Index group, Index batch) : count(std::min(LANES, batch - group * LANES)) {
        for (Index l = 0; l < LANES; l++) lane[l] = std::min(group * LANES + l, batch - 1);
    }
    // array[sample * stride + i * step] for i < size
    void read(const T *array, Index stride, Index step, Index size, V *found) const {
        if (stride == 1 && count == LANES) {
            for (Index i = 0; i < size; i++) std::memcpy(found + i, array + lane[0] + i * step, sizeof(V));
            return;
        }
        for (Index i = 0; i < size; i++)
            for (Index l = 0; l < LANES; l++) found[i][l] = array[lane[l] * stride + i * step];
    }
    void write(const V *found, Index stride, Index size, T *array) const {
        for (Index l = 0; l < count; l++)
            for (Index i = 0; i < size; i++) array[lane[l] * stride + i] = found[i][l];
    }
};

template <class T> using Vectors = std::vector<typename Vector<T>::type>;

template <class T> void factorize(const Symbolic &s, const Vectors<T> &values, typename Vector<T>::type *L) {
    using V = typename Vector<T>::type;
    for (Index p = 0; p < s.products; p++) L[s.target[p]] += values[s.first[p]] * values[s.second[p]];
    std::vector<Index> place(s.size);
    for (Index j = 0; j < s.size; j++) {
        const Index begin = s.start[j], end = s.start[j + 1];
        for (Index p = begin; p < end; p++) place[s.row[p]] = p;
        for (Index u = s.from[j]; u < s.from[j + 1]; u++) {
            const V factor = L[s.update[u]];
            for (Index p = s.update[u]; p < s.end[u]; p++) L[place[s.row[p]]] -= L[p] * factor;
        }
        V inverse;
        for (Index l = 0; l < LANES; l++) inverse[l] = T(1) / std::sqrt(L[begin][l]);  // NaN below 0
        L[begin] = inverse;
        for (Index p = begin + 1; p < end; p++) L[p] *= inverse;
    }
}

template <class T>
void substitute(const Symbolic &s, const typename Vector<T>::type *L, Vectors<T> &x, Vectors<T> &work) {
    using V = typename Vector<T>::type;
    for (Index j = 0; j < s.size; j++) work[j] = x[s.order[j]];
    for (Index j = 0; j < s.size; j++) {
        const V found = work[j] *= L[s.start[j]];
        for (Index p = s.start[j] + 1; p < s.start[j + 1]; p++) work[s.row[p]] -= L[p] * found;
    }
    for (Index j = s.size - 1; j >= 0; j--) {
        V sum = work[j];
        for (Index p = s.start[j] + 1; p < s.start[j + 1]; p++) sum -= L[p] * work[s.row[p]];
        x[s.order[j]] = work[j] = sum * L[s.start[j]];
    }
}

template <class T> void pull(const Jacobian &J, const Vectors<T> &values, const Vectors<T> &w, Vectors<T> &found) {
    std::fill(found.begin(), found.end(), typename Vector<T>::type{});
    for (Index e = 0; e < J.nonzeros; e++) found[J.col[e]] += values[e] * w[J.row[e]];
}

template <class T> void push(const Jacobian &J, const Vectors<T> &values, const Vectors<T> &v, Vectors<T> &found) {
    std::fill(found.begin(), found.end(), typename Vector<T>::type{});
    for (Index e = 0; e < J.nonzeros; e++) found[J.row[e]] += values[e] * v[J.col[e]];
}

template <class T> typename Vector<T>::type root(typename Vector<T>::type v) {
    for (Index l = 0; l < LANES; l++) v[l] = std::sqrt(v[l]);
    return v;
}

template <class T> typename Vector<T>::type norm(const Vectors<T> &x) {
    typename Vector<T>::type sum{};
    for (const auto &v : x) sum += v * v;
    return root<T>(sum);
}

// (J W J' + diag(damping)) mu = rhs for eight samples, by factors of this matrix, or of I + K'K in the primal form.
template <class T> class System {
    using V = typename Vector<T>::type;

  public:
    const Symbolic &s;
    const Jacobian &J;
    const V *L;
    bool primal, weighted;
    Vectors<T> values, damping, weights, roots, across, scaled, work;

    System(const Symbolic &s, const Jacobian &J, const V *L, bool primal, bool weighted)
        : s(s), J(J), L(L), primal(primal), weighted(weighted), values(J.nonzeros), damping(J.rows),
          weights(weighted ? J.columns : 0), roots(weights.size()), across(J.columns), scaled(J.rows), work(s.size) {}

    void weigh(Vectors<T> &v, const Vectors<T> &by) const {
        if (weighted)
            for (Index i = 0; i < J.columns; i++) v[i] *= by[i];
    }
    void once(const Vectors<T> &rhs, Vectors<T> &found) {
        if (!primal) {
            found = rhs;
            substitute<T>(s, L, found, work);
            return;
        }
        for (Index i = 0; i < J.rows; i++) scaled[i] = rhs[i] / damping[i];
        pull<T>(J, values, scaled, across);
        weigh(across, roots);
        substitute<T>(s, L, across, work);
        weigh(across, roots);
        push<T>(J, values, across, found);
        for (Index i = 0; i < J.rows; i++) found[i] = scaled[i] - found[i] / damping[i];
    }
    // rhs - matrix * x
    void residual(const Vectors<T> &rhs, const Vectors<T> &x, Vectors<T> &left) {
        pull<T>(J, values, x, across);
        weigh(across, weights);
        push<T>(J, values, across, left);
        for (Index i = 0; i < J.rows; i++) left[i] = rhs[i] - left[i] - damping[i] * x[i];
    }
    // The size of the numbers that cancel in a residual: no factor leaves less than their rounding.
    V reach(const Vectors<T> &rhs, const Vectors<T> &x, V length) {
        std::fill(across.begin(), across.end(), V{});
        for (Index e = 0; e < J.nonzeros; e++) {
            const V term = values[e] * x[J.row[e]];
            across[J.col[e]] += term < 0 ? -term : term;
        }
        weigh(across, roots);
        return norm<T>(rhs) + length * norm<T>(across);
    }
    // The solution, refined until its backward error is one of rounding, or no longer halves.
    void refined(const Vectors<T> &rhs, V length, T rounding, Index most, Vectors<T> &found) {
        Vectors<T> left(J.rows), change(J.rows), trial(J.rows), now(J.rows);
        once(rhs, found);
        const V goal = rounding * std::numeric_limits<T>::epsilon() * reach(rhs, found, length);
        residual(rhs, found, left);
        V size = norm<T>(left);
        auto going = size > goal;
        for (Index pass = 0; pass < most; pass++) {
            bool any = false;
            for (Index l = 0; l < LANES; l++) any |= bool(going[l]);
            if (!any) return;
            once(left, change);
            for (Index i = 0; i < J.rows; i++) trial[i] = found[i] + change[i];
            residual(rhs, trial, now);
            const V size_now = norm<T>(now);
            const auto better = going & (size_now < size);
            for (Index i = 0; i < J.rows; i++) {
                found[i] = better ? trial[i] : found[i];
                left[i] = better ? now[i] : left[i];
            }
            going = better & (size_now > goal) & (size_now < size / 2);
            size = better ? size_now : size;
        }
    }
};

template <class T>
void factor(const Symbolic *s, Index batch, Index nonzeros, const T *values, const T *diagonal, T *factors,
            std::int32_t *info) {
    using V = typename Vector<T>::type;
    Vectors<T> inside(nonzeros), pivots(s->size);
    for (Index g = 0; g * LANES < batch; g++) {
        const Group<T> group(g, batch);
        V *L = reinterpret_cast<V *>(factors) + g * s->entries;
        group.read(values, 1, batch, nonzeros, inside.data());
        group.read(diagonal, s->size, 1, s->size, pivots.data());
        std::fill(L, L + s->entries, V{});
        for (Index j = 0; j < s->size; j++) L[s->start[j]] = pivots[s->order[j]];
        factorize<T>(*s, inside, L);
        for (Index l = 0; l < group.count; l++) {
            bool good = true;
            for (Index j = 0; j < s->size; j++) good &= std::isfinite(L[s->start[j]][l]);
            info[group.lane[l]] = !good;
        }
    }
}

template <class T>
void solve(const Symbolic *s, Index batch, Index width, const T *factors, const T *rhs, T *found) {
    using V = typename Vector<T>::type;
    Vectors<T> x(s->size), work(s->size);
    for (Index g = 0; g * LANES < batch; g++) {
        const Group<T> group(g, batch);
        for (Index k = 0; k < width; k++) {
            group.read(rhs + k * s->size, width * s->size, 1, s->size, x.data());
            substitute<T>(*s, reinterpret_cast<const V *>(factors) + g * s->entries, x, work);
            group.write(x.data(), width * s->size, s->size, found + k * s->size);
        }
    }
}

template <class T>
void refine(const Symbolic *s, const Jacobian *J, Index batch, Index width, bool primal, T rounding, Index most,
            const T *factors, const T *values, const T *damping, const T *weights, const T *lengths, const T *rhs,
            T *found) {
    using V = typename Vector<T>::type;
    Vectors<T> right(J->rows), x(J->rows);
    for (Index g = 0; g * LANES < batch; g++) {
        const Group<T> group(g, batch);
        System<T> system(*s, *J, reinterpret_cast<const V *>(factors) + g * s->entries, primal, weights != nullptr);
        group.read(values, 1, batch, J->nonzeros, system.values.data());
        group.read(damping, J->rows, 1, J->rows, system.damping.data());
        if (weights) {
            group.read(weights, J->columns, 1, J->columns, system.weights.data());
            for (Index i = 0; i < J->columns; i++) system.roots[i] = root<T>(system.weights[i]);
        }
        V length;
        group.read(lengths, 1, 1, 1, &length);
        for (Index k = 0; k < width; k++) {
            group.read(rhs + k * J->rows, width * J->rows, 1, J->rows, right.data());
            system.refined(right, length, rounding, most, x);
            group.write(x.data(), width * J->rows, J->rows, found + k * J->rows);
        }
    }
}

template <class T>
void product(const Jacobian *J, Index batch, bool transposed, const T *values, const T *v, T *found) {
    const Index from = transposed ? J->rows : J->columns, to = transposed ? J->columns : J->rows;
    Vectors<T> inside(J->nonzeros), x(from), sums(to);
    for (Index g = 0; g * LANES < batch; g++) {
        const Group<T> group(g, batch);
        group.read(values, 1, batch, J->nonzeros, inside.data());
        group.read(v, from, 1, from, x.data());
        (transposed ? pull<T> : push<T>)(*J, inside, x, sums);
        group.write(sums.data(), to, to, found);
    }
}

}  // namespace

#define ENTRIES(T, S)                                                                                                   \
    extern "C" void factor_##S(const Symbolic *s, Index batch, Index nonzeros, const T *values, const T *diagonal,      \
                               T *factors, std::int32_t *info) {                                                        \
        factor<T>(s, batch, nonzeros, values, diagonal, factors, info);                                                 \
    }                                                                                                                   \
    extern "C" void solve_##S(const Symbolic *s, Index batch, Index width, const T *factors, const T *rhs, T *found) {  \
        solve<T>(s, batch, width, factors, rhs, found);                                                                 \
    }                                                                                                                   \
    extern "C" void refine_##S(const Symbolic *s, const Jacobian *J, Index batch, Index width, Index primal,            \
                               double rounding, Index most, const T *factors, const T *values, const T *damping,        \
                               const T *weights, const T *lengths, const T *rhs, T *found) {                            \
        refine<T>(s, J, batch, width, primal, T(rounding), most, factors, values, damping, weights, lengths, rhs,       \
                  found);                                                                                               \
    }                                                                                                                   \
    extern "C" void product_##S(const Jacobian *J, Index batch, Index transposed, const T *values, const T *v,          \
                                T *found) {                                                                             \
        product<T>(J, batch, transposed, values, v, found);                                                             \
    }

ENTRIES(double, f64)
ENTRIES(float, f32)
