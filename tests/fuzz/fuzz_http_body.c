/* Fuzzes the parsing of request bodies. The first byte chooses the endpoint. What is refused has a
 * code and a message that can be sent; what is taken is within the bounds and, when it is a chat,
 * renders to a prompt or to an error. */
#include "model/chat.h"
#include "router/answer.h"
#include "router/api.h"

static void check_error(const ApiError *e) {
    Buf out = {0};
    CHECK(e->status >= 400 && e->code && e->type && e->message[0]);
    answer_error(e, &out);
    json_t *root = json_loadb(out.data, out.len, 0, NULL);
    CHECK(json_is_object(json_object_get(root, "error")));
    json_decref(root);
    buf_done(&out);
}

static void check_req(const ApiModel *model, ApiReq *r) {
    const Baton__Sampling *s = &r->sampling;
    CHECK(s->temperature >= 0 && s->temperature <= 2 && s->top_p > 0 && s->top_p <= 1);
    CHECK(s->top_logprobs <= API_MAX_TOP_LOGPROBS && s->n_stop_token <= API_MAX_STOP);
    CHECK(r->max_tokens == -1 || r->max_tokens > 0);
    for (size_t i = 0; i < s->n_logit_bias; i++)
        CHECK(s->logit_bias[i]->token < (uint32_t)model->n_tokens);
    for (size_t i = 0; i < r->n_ids; i++)
        CHECK(r->ids[i] >= 0 && r->ids[i] < model->n_tokens);
    if (r->chat) {
        Buf prompt = {0};
        Err err = {0};
        int rc = chat_render(r->messages, NULL, &r->options, &prompt, &err);
        CHECK(rc == 0 ? prompt.len > 0 : err.code == rc);
        buf_done(&prompt);
    } else {
        CHECK(r->text_len > 0 || r->n_ids > 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const ApiModel model = {.name = "m",
                                   .max_context = 8192,
                                   .default_max_tokens = 256,
                                   .n_tokens = 4096,
                                   .temperature = 1,
                                   .top_p = 1,
                                   .enable_thinking = true,
                                   .eos = {1},
                                   .n_eos = 1,
                                   .think_end = 2};
    if (size == 0)
        return 0;
    ApiReq req;
    ApiError error;
    if (api_parse(&model, data[0] & 1, (const char *)data + 1, size - 1, &req, &error)) {
        check_error(&error);
        return 0;
    }
    check_req(&model, &req);
    api_done(&req);
    return 0;
}
