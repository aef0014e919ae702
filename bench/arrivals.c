/* A webhook receiver that costs next to nothing and notes when each message came.

   Prints its port. POST /hook/<n> is answered 204 and counts as one message for subscription n, POST /batch/<n> as as
   many as its body has CloudEvents, POST /hang/<n> is never answered, POST /check is answered with a commit.
   GET /count: messages since the log was last taken. GET /log: takes the log, as an array of `struct arrival`.
   GET /sample: the last message's request, as it came. One thread; stops at SIGTERM. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MOST 16384
#define ID 36

struct arrival {
  int64_t ns; /* CLOCK_MONOTONIC */
  uint32_t subscription, messages;
  char transaction[ID + 4]; /* NUL if the request did not name it */
};

struct connection {
  char *bytes;
  size_t used, room;
};

static struct pollfd polled[MOST];
static struct connection connections[MOST];
static nfds_t open_;
static struct arrival *arrivals;
static size_t arrived, arrivals_room;
static uint64_t messages;
static char sample[65536];
static size_t sample_size;

static void *grown(void *old, size_t size) {
  void *new = realloc(old, size);
  if (!new) exit(3);
  return new;
}

static void send_all(int fd, const char *bytes, size_t size) {
  while (size) {
    ssize_t sent = write(fd, bytes, size);
    if (sent > 0) {
      bytes += sent;
      size -= (size_t)sent;
    } else if (sent < 0 && (errno == EAGAIN || errno == EINTR)) {
      struct pollfd writable = {fd, POLLOUT, 0};
      poll(&writable, 1, 1000);
    } else {
      return; /* closed: the next read says so */
    }
  }
}

static void answer(int fd, const char *bytes, size_t size) {
  char head[128];
  int length = snprintf(head, sizeof head, "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", size);
  send_all(fd, head, (size_t)length);
  send_all(fd, bytes, size);
}

/* The value of a header in a head that ends with NUL, or NULL; `name` is "\n<name>:". */
static const char *header(const char *head, const char *name) {
  const char *found = strcasestr(head, name);
  if (!found) return NULL;
  found += strlen(name);
  while (*found == ' ') found++;
  return found;
}

static uint32_t events_in(const char *body, size_t size) {
  static const char word[] = "\"specversion\"";
  uint32_t count = 0;
  const char *at = body, *end = body + size;
  while ((at = memmem(at, (size_t)(end - at), word, sizeof word - 1))) {
    count++;
    at += sizeof word - 1;
  }
  return count;
}

static void note(const char *head, uint32_t subscription, uint32_t count) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  if (arrived == arrivals_room) {
    arrivals_room = arrivals_room ? 2 * arrivals_room : 65536;
    arrivals = grown(arrivals, arrivals_room * sizeof *arrivals);
  }
  struct arrival *new = &arrivals[arrived++];
  memset(new, 0, sizeof *new);
  new->ns = now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
  new->subscription = subscription;
  new->messages = count;
  const char *id = header(head, "\nhalfnote-transaction:");
  if (id) memcpy(new->transaction, id, strnlen(id, ID));
  messages += count;
}

static void take(int fd, const char *head, size_t head_size, const char *body, size_t size) {
  static const char taken[] = "HTTP/1.1 204 No Content\r\n\r\n";
  static const char commit[] =
      "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n{\"verdict\":\"commit\"}";
  if (!strncmp(head, "POST /hook/", 11) || !strncmp(head, "POST /batch/", 12)) {
    int batch = head[6] == 'b';
    note(head, (uint32_t)atoi(head + (batch ? 12 : 11)), batch ? events_in(body, size) : 1);
    if (head_size + 4 + size <= sizeof sample) {
      sample_size = head_size + 4 + size;
      memcpy(sample, head, head_size);
      memcpy(sample + head_size, "\r\n\r\n", 4);
      memcpy(sample + head_size + 4, body, size);
    }
    send_all(fd, taken, sizeof taken - 1);
  } else if (!strncmp(head, "POST /hang/", 11)) {
    /* no answer, ever */
  } else if (!strncmp(head, "POST /check", 11)) {
    send_all(fd, commit, sizeof commit - 1);
  } else if (!strncmp(head, "GET /count ", 11)) {
    char count[32];
    answer(fd, count, (size_t)snprintf(count, sizeof count, "%llu", (unsigned long long)messages));
  } else if (!strncmp(head, "GET /log ", 9)) {
    answer(fd, (char *)arrivals, arrived * sizeof *arrivals);
    arrived = messages = 0;
  } else if (!strncmp(head, "GET /sample ", 12)) {
    answer(fd, sample, sample_size);
  } else {
    static const char unknown[] = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
    send_all(fd, unknown, sizeof unknown - 1);
  }
}

/* Takes every whole request that is there; the rest stays for the next read. */
static void serve(int fd, struct connection *c) {
  size_t done = 0;
  for (;;) {
    char *head = c->bytes + done;
    char *end = memmem(head, c->used - done, "\r\n\r\n", 4);
    if (!end) break;
    *end = 0;
    const char *value = header(head, "\ncontent-length:");
    size_t size = value ? strtoul(value, NULL, 10) : 0, whole = (size_t)(end - head) + 4 + size;
    if (done + whole > c->used) {
      *end = '\r';
      break;
    }
    take(fd, head, (size_t)(end - head), end + 4, size);
    done += whole;
  }
  memmove(c->bytes, c->bytes + done, c->used - done);
  c->used -= done;
}

/* Reads what is there; returns 0 once the other side is gone. */
static int read_some(int fd, struct connection *c) {
  if (c->room - c->used < 16384) c->bytes = grown(c->bytes, c->room = 2 * c->room + 32768);
  ssize_t got = read(fd, c->bytes + c->used, c->room - c->used - 1);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return 1;
  if (got <= 0) return 0;
  c->used += (size_t)got;
  c->bytes[c->used] = 0;
  serve(fd, c);
  return 1;
}

static void welcome(int listener) {
  int fd, on = 1;
  while (open_ < MOST && (fd = accept(listener, NULL, NULL)) >= 0) {
    fcntl(fd, F_SETFL, O_NONBLOCK);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    memset(&connections[open_], 0, sizeof connections[open_]);
    polled[open_++] = (struct pollfd){fd, POLLIN, 0};
  }
}

static void goodbye(nfds_t n) {
  close(polled[n].fd);
  free(connections[n].bytes);
  polled[n] = polled[--open_];
  connections[n] = connections[open_];
}

int main(void) {
  struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof here;
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  if (bind(listener, (struct sockaddr *)&here, size) || listen(listener, 2048)) return 2;
  getsockname(listener, (struct sockaddr *)&here, &size);
  fcntl(listener, F_SETFL, O_NONBLOCK);
  polled[open_++] = (struct pollfd){listener, POLLIN, 0};
  printf("%d\n", ntohs(here.sin_port));
  fflush(stdout);
  for (;;) {
    if (poll(polled, open_, -1) < 0 && errno != EINTR) return 2;
    /* Backwards: who leaves is replaced by one that was looked at already. */
    for (nfds_t n = open_; n-- > 1;)
      if (polled[n].revents && !read_some(polled[n].fd, &connections[n])) goodbye(n);
    if (polled[0].revents) welcome(listener);
  }
}
