/* See sglang_words.h. */
#include "deploy/baton/sglang_words.h"

#include <string.h>

typedef struct Cut {
    const char *at; /* to be read; behind `to` or at it */
    char *to;       /* where the current word grows */
    int line;
} Cut;

/* One word from c->at on, without its quotes and backslashes. False: a quote stays open. */
static bool cut_word(Cut *c) {
    char quote = 0;
    for (; *c->at; c->at++) {
        char ch = *c->at;
        c->line += ch == '\n';
        if (quote == '\'' ? ch == '\'' : quote && ch == quote) {
            quote = 0;
        } else if (quote == '\'') {
            *c->to++ = ch;
        } else if (ch == '\\' && c->at[1]) {
            ch = *++c->at;
            c->line += ch == '\n';
            if (ch != '\n')
                *c->to++ = ch;
        } else if (!quote && (ch == '\'' || ch == '"')) {
            quote = ch;
        } else if (!quote && strchr(" \t\r\n", ch)) {
            c->line -= ch == '\n'; /* the caller sees it again */
            break;
        } else {
            *c->to++ = ch;
        }
    }
    return !quote;
}

/* Space, comments and continued lines; whether a line began. */
static bool skip(Cut *c) {
    bool began = false;
    for (; *c->at; c->at++) {
        if (*c->at == '\n') {
            c->line++;
            began = true;
        } else if (c->at[0] == '\\' &&
                   (c->at[1] == '\n' || (c->at[1] == '\r' && c->at[2] == '\n'))) {
            c->at += c->at[1] == '\r' ? 2 : 1;
            c->line++;
        } else if (*c->at == '#') {
            while (c->at[1] && c->at[1] != '\n')
                c->at++;
        } else if (!strchr(" \t\r", *c->at)) {
            break;
        }
    }
    return began;
}

int sglang_words(char *text, const char *name, SglangWord **words, int *n, Err *err) {
    Cut c = {.at = text, .to = text, .line = 1};
    int count = 0, cap = 0;
    SglangWord *list = NULL;
    bool first = true;
    for (;;) {
        first |= skip(&c);
        if (!*c.at)
            break;
        if (count == cap) {
            cap = cap ? cap * 2 : 64;
            list = xrealloc(list, (size_t)cap * sizeof *list);
        }
        int line = c.line;
        list[count++] = (SglangWord){c.to, line, first, *c.at == '"' || *c.at == '\''};
        first = false;
        if (!cut_word(&c)) {
            free(list);
            return err_set(err, E_FORMAT, "%.180s:%d: a quote is not closed", name, line);
        }
        /* The end of the word may be where the next character is still to be read. */
        if (c.to == c.at && *c.at) {
            bool newline = *c.at == '\n';
            c.line += newline;
            first |= newline;
            c.at++;
        }
        *c.to++ = 0;
        if (c.to > c.at && *c.at == 0)
            break;
    }
    *words = list;
    *n = count;
    return 0;
}
