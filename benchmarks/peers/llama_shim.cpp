// Drives llama.cpp for llama_arm.py: prompts as token ids, several sequences in each call of llama_decode, greedy tokens.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "llama.h"

namespace {

struct Engine {
    llama_model* model = nullptr;
    llama_context* context = nullptr;
    int32_t vocabulary = 0;
};

struct Sequence {
    const int32_t* prompt;
    int32_t prompt_len, output_len, sent = 0, made = 0, position = 0;
    int32_t* out;
};

int32_t largest(const float* logits, int32_t count) { return static_cast<int32_t>(std::max_element(logits, logits + count) - logits); }

void add(llama_batch& batch, int32_t token, int32_t position, int32_t sequence, bool logits) {
    const int32_t i = batch.n_tokens++;
    batch.token[i] = token, batch.pos[i] = position, batch.n_seq_id[i] = 1, batch.seq_id[i][0] = sequence, batch.logits[i] = logits;
}

}  // namespace

// Returns null if the model cannot be loaded. `context` is the number of tokens of one sequence.
extern "C" void* shim_open(const char* path, int32_t threads, int32_t sequences, int32_t context) {
    llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    llama_backend_init();
    auto* engine = new Engine;
    engine->model = llama_model_load_from_file(path, llama_model_default_params());
    if (engine->model == nullptr) return nullptr;
    llama_context_params params = llama_context_default_params();
    params.n_ctx = context * sequences;
    params.n_seq_max = sequences;
    params.n_batch = 2048;
    params.n_threads = params.n_threads_batch = threads;
    params.no_perf = true;
    engine->context = llama_init_from_model(engine->model, params);
    engine->vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(engine->model));
    return engine->context == nullptr ? nullptr : engine;
}

// Generates `output_lens[i]` tokens for prompt i, all prompts together. A sequence leaves when it has its tokens. Prompts and outputs
// follow each other in `prompts` and `out`. Returns 0, or what llama_decode returned.
extern "C" int32_t shim_generate(void* handle, const int32_t* prompts, const int32_t* prompt_lens, const int32_t* output_lens, int32_t count,
                                 int32_t* out) {
    auto* engine = static_cast<Engine*>(handle);
    const auto limit = static_cast<int32_t>(llama_n_batch(engine->context));
    std::vector<Sequence> all;
    for (int32_t i = 0; i < count; ++i) {
        all.push_back({prompts, prompt_lens[i], output_lens[i], 0, 0, 0, out});
        prompts += prompt_lens[i], out += output_lens[i];
    }
    llama_batch batch = llama_batch_init(limit, 0, 1);
    int32_t error = 0, left = count;
    while (left > 0 && error == 0) {
        std::vector<std::pair<int32_t, int32_t>> rows;  // places in the batch whose logits are read, and their sequences
        batch.n_tokens = 0;
        for (int32_t i = 0; i < count; ++i) {
            Sequence& one = all[i];
            if (one.made > 0 && one.made < one.output_len) {
                rows.emplace_back(batch.n_tokens, i);
                add(batch, one.out[one.made - 1], one.position++, i, true);
            }
        }
        for (int32_t i = 0; i < count; ++i) {
            Sequence& one = all[i];
            for (; one.sent < one.prompt_len && batch.n_tokens < limit; ++one.sent) {
                const bool last = one.sent + 1 == one.prompt_len;
                if (last) rows.emplace_back(batch.n_tokens, i);
                add(batch, one.prompt[one.sent], one.position++, i, last);
            }
        }
        error = llama_decode(engine->context, batch);
        for (const auto& [place, i] : rows) {
            if (error != 0) break;
            Sequence& one = all[i];
            one.out[one.made++] = largest(llama_get_logits_ith(engine->context, place), engine->vocabulary);
            if (one.made == one.output_len) {
                llama_memory_seq_rm(llama_get_memory(engine->context), i, -1, -1);
                --left;
            }
        }
    }
    llama_batch_free(batch);
    llama_memory_clear(llama_get_memory(engine->context), true);
    return error;
}
