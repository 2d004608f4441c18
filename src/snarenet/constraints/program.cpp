// Runs straight-line programs of arithmetic for a batch, eight samples side by side in a vector.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

using Index = std::int64_t;
constexpr Index LANES = 8;

extern "C" {
struct Code {  // see `_Code` in program.py
    Index slots, constants, instructions, outputs, inputs;
    const double *constant;         // the first slots
    const std::int32_t *instruction;  // (operation, target, first, second) each
    const std::int32_t *output;     // slots
    const Index *width;             // of each input array; they fill the slots after the constants
};
}

namespace {

enum Operation { ADD, SUB, MUL, DIV, NEG, SIN, COS, EXP, LOG, SQRT, TANH };

template <class T> using Unary = T (*)(T);

template <class T> struct Vector {
    typedef T type __attribute__((vector_size(LANES * sizeof(T))));
};

template <class T> void run(const Code *code, Index batch, const T *const *inputs, T *found) {
    using V = typename Vector<T>::type;
    std::vector<V> slot(code->slots);
    const auto each = [](V v, Unary<T> function) {
        for (Index l = 0; l < LANES; l++) v[l] = function(v[l]);
        return v;
    };
    for (Index c = 0; c < code->constants; c++) slot[c] = V{} + T(code->constant[c]);
    for (Index begin = 0; begin < batch; begin += LANES) {
        const Index count = std::min(LANES, batch - begin);
        Index place = code->constants;
        for (Index i = 0; i < code->inputs; i++)
            for (Index j = 0; j < code->width[i]; j++, place++)
                for (Index l = 0; l < LANES; l++)  // the last sample stands for those beyond the batch
                    slot[place][l] = inputs[i][std::min(begin + l, batch - 1) * code->width[i] + j];
        for (Index k = 0; k < code->instructions; k++) {
            const std::int32_t *const step = code->instruction + 4 * k;
            const V a = slot[step[2]], b = slot[step[3]];
            V &target = slot[step[1]];
            switch (step[0]) {
                case ADD: target = a + b; break;
                case SUB: target = a - b; break;
                case MUL: target = a * b; break;
                case DIV: target = a / b; break;
                case NEG: target = -a; break;
                case SIN: target = each(a, std::sin); break;
                case COS: target = each(a, std::cos); break;
                case EXP: target = each(a, std::exp); break;
                case LOG: target = each(a, std::log); break;
                case SQRT: target = each(a, std::sqrt); break;
                case TANH: target = each(a, std::tanh); break;
            }
        }
        for (Index o = 0; o < code->outputs; o++) {
            const V &v = slot[code->output[o]];
            for (Index l = 0; l < count; l++) found[o * batch + begin + l] = v[l];
        }
    }
}

}  // namespace

extern "C" void run_f64(const Code *code, Index batch, const double *const *inputs, double *found) {
    run<double>(code, batch, inputs, found);
}
extern "C" void run_f32(const Code *code, Index batch, const float *const *inputs, float *found) {
    run<float>(code, batch, inputs, found);
}
