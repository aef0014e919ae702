/* Callers that send half messages and ends to Halfnote and cost next to nothing: `callers PORT HALF END`.

   HALF and END are files with one whole HTTP request each, in which the transaction_id is PLACEHOLDER. Prints `ready`.
   A line on stdin is one slice: `run CALLERS SECONDS`, each caller with its next transaction as soon as the end is
   answered; `ahead CALLERS SECONDS`, each with its next one as soon as the end is sent; `batch CALLERS SECONDS`, as
   `run`, but callers that wait at the same time share a request, as with the Python client; or
   `pace RATE SECONDS`, on schedule, whether or not earlier ones are answered. The answer is a line `COMMITTED FAILED BEGAN_NS`
   and COMMITTED times `struct sent`. FAILED: answers other than 2xx, lost connections, and answers that took ANSWER_S.
   One thread. Times are CLOCK_MONOTONIC. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define ID 36
#define PLACEHOLDER "00000000-0000-7000-8000-000000000000"
/* The most connections. */
#define MOST 512
#define ROOM 65536
/* With `batch`: the requests of each kind that are under way at most, and the transactions of a request. */
#define UNDER_WAY 2
#define TOGETHER 128
#define ANSWER_S 60
#define S INT64_C(1000000000)

struct sent {
  int64_t ns; /* just before the end was sent */
  char transaction[ID + 4];
};

struct request {
  char *bytes;
  size_t size, id_at;
};

enum waits { FREE, HALF, END };

struct connection {
  int fd, own; /* `own`: a caller's, which takes the next transaction */
  enum waits waits;
  int64_t since_ns;
  char id[ID];
  char answer[ROOM];
  size_t used;
  int count; /* with `batch`: so many transactions */
  char ids[TOGETHER][ID];
};

static struct request half, end_;
static struct connection *connections;
static int opened, port;
static struct sent *commits;
static size_t committed, commits_room, failed, in_flight;
static uint64_t random_state;

static int64_t now_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * S + now.tv_nsec;
}

static void stop(const char *why) {
  perror(why);
  exit(2);
}

static uint64_t noise(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state;
}

/* A UUIDv7 of this moment. */
static void new_id(char *id) {
  char text[ID + 1];
  uint64_t ms = (uint64_t)now_ns(CLOCK_REALTIME) / 1000000, a = noise(), b = noise();
  snprintf(text, sizeof text, "%08x-%04x-7%03x-%04x-%04x%08x", (unsigned)(ms >> 16), (unsigned)(ms & 0xffff),
           (unsigned)(a & 0xfff), (unsigned)(0x8000 | (a >> 12 & 0x3fff)), (unsigned)(a >> 32 & 0xffff), (unsigned)b);
  memcpy(id, text, ID);
}

static struct request loaded(const char *path) {
  FILE *file = fopen(path, "rb");
  struct request request = {calloc(1, ROOM), 0, 0};
  if (!file || !request.bytes) stop(path);
  request.size = fread(request.bytes, 1, ROOM, file);
  fclose(file);
  char *id = memmem(request.bytes, request.size, PLACEHOLDER, ID);
  if (!id) stop("a request without the placeholder");
  request.id_at = (size_t)(id - request.bytes);
  return request;
}

static void send_one(struct connection *c, struct request *request, enum waits waits) {
  memcpy(request->bytes + request->id_at, c->id, ID);
  c->waits = waits;
  c->used = 0;
  c->since_ns = now_ns(CLOCK_MONOTONIC);
  /* Far smaller than the socket's buffer, which is empty, because the last request is answered. */
  if (write(c->fd, request->bytes, request->size) != (ssize_t)request->size) stop("a request was not sent whole");
  in_flight++;
}

static struct connection *connected(int own) {
  int on = 1, room = 1 << 20;
  struct connection *c = &connections[opened++];
  struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
  there.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  memset(c, 0, sizeof *c);
  c->own = own;
  c->fd = socket(AF_INET, SOCK_STREAM, 0);
  if (c->fd < 0 || c->fd >= FD_SETSIZE || connect(c->fd, (struct sockaddr *)&there, sizeof there)) stop("connect");
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(c->fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  fcntl(c->fd, F_SETFL, O_NONBLOCK);
  return c;
}

/* NULL if MOST are in use. */
static struct connection *free_one(void) {
  for (int n = 0; n < opened; n++)
    if (connections[n].waits == FREE && !connections[n].own && connections[n].fd >= 0) return &connections[n];
  return opened < MOST ? connected(0) : NULL;
}

static void begin(struct connection *c) {
  new_id(c->id);
  send_one(c, &half, HALF);
}

/* Note that the end of a transaction is sent. */
static void note(const char *id) {
  if (committed == commits_room) {
    commits_room = commits_room ? 2 * commits_room : 65536;
    if (!(commits = realloc(commits, commits_room * sizeof *commits))) stop("memory");
  }
  struct sent *new = &commits[committed++];
  memset(new, 0, sizeof *new);
  memcpy(new->transaction, id, ID);
  new->ns = now_ns(CLOCK_MONOTONIC);
}

static void commit(struct connection *c) {
  note(c->id);
  send_one(c, &end_, END);
}

static void lost(struct connection *c, const char *why) {
  fprintf(stderr, "%s: %.200s\n", why, c->answer);
  failed++;
  close(c->fd);
  c->fd = -1;
  c->waits = FREE;
}

/* The answer to the request is there. `ahead`: the caller does not wait for the answer to its end. */
static void answered(struct connection *c, int ahead, int more) {
  enum waits was = c->waits;
  in_flight--;
  c->waits = FREE;
  if (c->answer[9] != '2') {
    lost(c, "refused");
  } else if (was == HALF) {
    struct connection *other = ahead ? free_one() : NULL;
    if (!other) {
      commit(c);
      return;
    }
    memcpy(other->id, c->id, ID);
    commit(other);
    if (more) begin(c);
  } else if (c->own && more) {
    begin(c);
  }
}

static void (*on_answer)(struct connection *, int, int) = answered;

static void read_some(struct connection *c, int ahead, int more) {
  ssize_t got = read(c->fd, c->answer + c->used, ROOM - 1 - c->used);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (got <= 0) {
    in_flight -= c->waits != FREE;
    lost(c, "closed");
    return;
  }
  c->used += (size_t)got;
  c->answer[c->used] = 0;
  char *body = strstr(c->answer, "\r\n\r\n"), *length = strcasestr(c->answer, "\ncontent-length:");
  if (!body) return;
  size_t size = length && length < body ? strtoul(length + 16, NULL, 10) : 0;
  if (c->used >= (size_t)(body - c->answer) + 4 + size) on_answer(c, ahead, more);
}

/* Waits until a time, or until an answer, and reads what is there. */
static void turn(int64_t until_ns, int ahead, int64_t stop_ns) {
  fd_set readable;
  int highest = -1;
  int64_t wait_ns = until_ns - now_ns(CLOCK_MONOTONIC);
  struct timespec wait = {wait_ns > 0 ? wait_ns / S : 0, wait_ns > 0 ? wait_ns % S : 0};
  FD_ZERO(&readable);
  for (int n = 0; n < opened; n++)
    if (connections[n].fd >= 0) {
      FD_SET(connections[n].fd, &readable);
      if (connections[n].fd > highest) highest = connections[n].fd;
    }
  if (pselect(highest + 1, &readable, NULL, NULL, &wait, NULL) <= 0) return;
  int more = now_ns(CLOCK_MONOTONIC) < stop_ns;
  for (int n = 0, known = opened; n < known; n++)
    if (connections[n].fd >= 0 && FD_ISSET(connections[n].fd, &readable)) read_some(&connections[n], ahead, more);
}

static void drain(int ahead, int64_t stop_ns) {
  int64_t until_ns = now_ns(CLOCK_MONOTONIC) + ANSWER_S * S;
  while (in_flight && now_ns(CLOCK_MONOTONIC) < until_ns) turn(until_ns, ahead, stop_ns);
  failed += in_flight;
}

static void run(int callers, double seconds, int ahead) {
  int64_t stop_ns = now_ns(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9);
  for (int n = 0; n < callers; n++) begin(connected(1));
  while (now_ns(CLOCK_MONOTONIC) < stop_ns) turn(stop_ns, ahead, stop_ns);
  drain(ahead, stop_ns);
}

/* Transactions that wait for a request, by kind. */
static char waiting[END + 1][MOST][ID];
static int waiting_count[END + 1];

/* Sends what waits of one kind in one request. */
static void send_batch(struct connection *c, enum waits kind) {
  static char bytes[TOGETHER * 1024];
  struct request *one = kind == HALF ? &half : &end_;
  const char *body = strstr(one->bytes, "\r\n\r\n") + 4, *list = kind == HALF ? "halves" : "ends";
  size_t size = one->size - (size_t)(body - one->bytes), id_at = one->id_at - (size_t)(body - one->bytes);
  int count = waiting_count[kind] < TOGETHER ? waiting_count[kind] : TOGETHER;
  if (size > 1000) stop("a request is too long for a batch");
  if (count == 1) {
    c->count = 0;
    memcpy(c->id, waiting[kind][0], ID);
    waiting_count[kind] = 0;
    if (kind == HALF) send_one(c, &half, HALF);
    else commit(c);
    return;
  }
  size_t used = (size_t)sprintf(bytes,
    "POST /%s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n{\"%s\":[",
    list, port, (size + 1) * (size_t)count - 1 + strlen(list) + 7, list);
  for (int n = 0; n < count; n++) {
    if (n) bytes[used++] = ',';
    memcpy(bytes + used, body, size);
    memcpy(bytes + used + id_at, waiting[kind][n], ID);
    memcpy(c->ids[n], waiting[kind][n], ID);
    used += size;
    if (kind == END) note(c->ids[n]);
  }
  used += (size_t)sprintf(bytes + used, "]}");
  waiting_count[kind] -= count;
  memmove(waiting[kind], waiting[kind][count], (size_t)waiting_count[kind] * ID);
  c->count = count;
  c->waits = kind;
  c->used = 0;
  c->since_ns = now_ns(CLOCK_MONOTONIC);
  if (write(c->fd, bytes, used) != (ssize_t)used) stop("a request was not sent whole");
  in_flight++;
}

static void waits_for(enum waits kind, const char *id) {
  memcpy(waiting[kind][waiting_count[kind]++], id, ID);
}

static void batch_answered(struct connection *c, int ahead, int more) {
  (void)ahead;
  int good = 0;
  enum waits was = c->waits;
  char id[ID];
  in_flight--;
  c->waits = FREE;
  if (c->count == 0) {
    /* A single request. */
    memcpy(c->ids[0], c->id, ID);
    c->count = 1;
    good = c->answer[9] == '2';
  } else {
    for (char *at = c->answer; (at = strstr(at, "{\"status\":2")); at++) good++;
  }
  if (good != c->count) {
    lost(c, "refused");
    return;
  }
  for (int n = 0; n < c->count; n++) {
    if (was == HALF) {
      waits_for(END, c->ids[n]);
    } else if (more) {
      new_id(id);
      waits_for(HALF, id);
    }
  }
}

static void batch_turn(int64_t until_ns, int64_t stop_ns) {
  for (enum waits kind = HALF; kind <= END; kind++)
    for (int n = 0; n < UNDER_WAY && waiting_count[kind]; n++) {
      struct connection *c = &connections[(kind - HALF) * UNDER_WAY + n];
      if (c->fd >= 0 && c->waits == FREE) send_batch(c, kind);
    }
  turn(until_ns, 0, stop_ns);
}

static void batch(int callers, double seconds) {
  int64_t stop_ns = now_ns(CLOCK_MONOTONIC) + (int64_t)(seconds * 1e9), until_ns = stop_ns + ANSWER_S * S;
  char id[ID];
  for (int n = 0; n < 2 * UNDER_WAY; n++) connected(0);
  waiting_count[HALF] = waiting_count[END] = 0;
  for (int n = 0; n < callers; n++) {
    new_id(id);
    waits_for(HALF, id);
  }
  on_answer = batch_answered;
  while (now_ns(CLOCK_MONOTONIC) < stop_ns) batch_turn(stop_ns, stop_ns);
  while ((in_flight || waiting_count[END] || waiting_count[HALF]) && now_ns(CLOCK_MONOTONIC) < until_ns && !failed)
    batch_turn(until_ns, stop_ns);
  failed += in_flight;
  on_answer = answered;
}

static void pace(double rate, double seconds) {
  int64_t first_ns = now_ns(CLOCK_MONOTONIC);
  for (long n = 0; n < (long)(rate * seconds); n++) {
    int64_t due_ns = first_ns + (int64_t)((double)n / rate * 1e9);
    while (now_ns(CLOCK_MONOTONIC) < due_ns) turn(due_ns, 0, 0);
    struct connection *c;
    /* A service that does not keep up makes later ones wait, as the threads of other clients do. */
    while (!(c = free_one())) turn(now_ns(CLOCK_MONOTONIC) + S, 0, 0);
    begin(c);
  }
  drain(0, 0);
}

int main(int count, char **words) {
  char kind[8];
  double size, seconds;
  if (count != 4) return 1;
  port = atoi(words[1]);
  half = loaded(words[2]);
  end_ = loaded(words[3]);
  connections = calloc(MOST, sizeof *connections);
  FILE *seed = fopen("/dev/urandom", "rb");
  if (!connections || !seed || fread(&random_state, sizeof random_state, 1, seed) != 1) stop("startup");
  random_state |= 1;
  printf("ready\n");
  fflush(stdout);
  while (scanf("%7s %lf %lf", kind, &size, &seconds) == 3) {
    committed = failed = in_flight = 0;
    int64_t began_ns = now_ns(CLOCK_MONOTONIC);
    if (!strcmp(kind, "pace")) pace(size, seconds);
    else if (!strcmp(kind, "batch")) batch((int)size, seconds);
    else run((int)size, seconds, !strcmp(kind, "ahead"));
    for (int n = 0; n < opened; n++)
      if (connections[n].fd >= 0) close(connections[n].fd);
    opened = 0;
    printf("%zu %zu %lld\n", committed, failed, (long long)began_ns);
    fwrite(commits, sizeof *commits, committed, stdout);
    fflush(stdout);
  }
  return 0;
}
