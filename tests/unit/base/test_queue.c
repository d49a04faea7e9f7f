/* base/queue: order, bound, deadlines, closing, many threads. */
#include "base/queue.h"

#include "base/clock.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <time.h>

static int items[8];

static void items_come_out_in_order_up_to_the_bound(void **state) {
    (void)state;
    Queue *q = queue_new(3);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < 3; i++)
            assert_true(queue_push(q, &items[i]));
        assert_false(queue_push(q, &items[3]));
        assert_int_equal(queue_length(q), 3);
        assert_ptr_equal(queue_pop(q, 0), &items[0]);
        assert_true(queue_push(q, &items[3]));
        for (int i = 1; i < 4; i++)
            assert_ptr_equal(queue_pop(q, 0), &items[i]);
        assert_null(queue_pop(q, 0));
    }
    queue_free(q);
    queue_free(NULL);
}

static void pop_waits_until_its_deadline(void **state) {
    (void)state;
    Queue *q = queue_new(1);
    int64_t before = clock_now_ms();
    assert_null(queue_pop(q, 60));
    int64_t waited = clock_now_ms() - before;
    assert_true(waited >= 59 && waited < 5000);
    queue_free(q);
}

static void *push_late(void *arg) {
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    queue_push(arg, &items[5]);
    return NULL;
}

static void *close_late(void *arg) {
    nanosleep(&(struct timespec){.tv_nsec = 30000000}, NULL);
    queue_close(arg);
    return NULL;
}

static void a_waiting_pop_wakes_up(void **state) {
    (void)state;
    pthread_t thread;
    Queue *q = queue_new(1);
    pthread_create(&thread, NULL, push_late, q);
    assert_ptr_equal(queue_pop(q, 10000), &items[5]);
    pthread_join(thread, NULL);
    pthread_create(&thread, NULL, close_late, q);
    assert_null(queue_pop(q, -1));
    pthread_join(thread, NULL);
    queue_free(q);
}

static void a_closed_queue_gives_what_it_holds(void **state) {
    (void)state;
    Queue *q = queue_new(4);
    queue_push(q, &items[0]);
    queue_close(q);
    assert_false(queue_push(q, &items[1]));
    assert_ptr_equal(queue_pop(q, -1), &items[0]);
    assert_null(queue_pop(q, -1));
    queue_free(q);
}

enum { PER_THREAD = 20000, N_THREADS = 3 };
static uint8_t seen[N_THREADS * PER_THREAD]; /* one popper at a time writes an entry: the queue
                                                hands each item out once */

typedef struct Producer {
    Queue *q;
    int first;
} Producer;

static void *produce(void *arg) {
    Producer *p = arg;
    for (int i = 0; i < PER_THREAD; i++)
        while (!queue_push(p->q, &seen[p->first + i]))
            sched_yield();
    return NULL;
}

static void *consume(void *arg) {
    for (uint8_t *item; (item = queue_pop(arg, -1));)
        (*item)++;
    return NULL;
}

static void every_item_arrives_once(void **state) {
    (void)state;
    Queue *q = queue_new(64);
    pthread_t producers[N_THREADS], consumers[N_THREADS];
    Producer p[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        p[i] = (Producer){q, i * PER_THREAD};
        pthread_create(&producers[i], NULL, produce, &p[i]);
        pthread_create(&consumers[i], NULL, consume, q);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(producers[i], NULL);
    queue_close(q);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(consumers[i], NULL);
    for (int i = 0; i < N_THREADS * PER_THREAD; i++)
        assert_int_equal(seen[i], 1);
    queue_free(q);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(items_come_out_in_order_up_to_the_bound),
        cmocka_unit_test(pop_waits_until_its_deadline),
        cmocka_unit_test(a_waiting_pop_wakes_up),
        cmocka_unit_test(a_closed_queue_gives_what_it_holds),
        cmocka_unit_test(every_item_arrives_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
