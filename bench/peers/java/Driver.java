import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.StringJoiner;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Sends transactions to RocketMQ and receives their messages: `java Driver NAME_SERVER BODY_FILE CONSUMERS`.
 *
 * Prints `ready`. Each line `run AT_ONCE SECONDS WITHIN` or `pace RATE SECONDS WITHIN` on stdin is one slice, and its
 * answer is a line of JSON. WITHIN is how many seconds the last messages may take after the last send.
 */
public final class Driver {
  private static final String TOPIC = "order";
  private static final int MOST = 2_000_000;
  private static final int PACED_THREADS = 128;

  /** The times of one slice, by the number of the message. */
  private static final class Slice {
    final int number;
    final AtomicInteger next = new AtomicInteger();
    final AtomicInteger received = new AtomicInteger();
    final AtomicInteger repeated = new AtomicInteger();
    final AtomicInteger failed = new AtomicInteger();
    final AtomicLongArray committedNs = new AtomicLongArray(MOST);
    final AtomicLongArray receivedNs = new AtomicLongArray(MOST);
    volatile long lastNs;

    Slice(int number) {
      this.number = number;
    }
  }

  private static volatile Slice slice = new Slice(0);

  public static void main(String[] arguments) {
    try {
      answerLines(arguments);
      System.exit(0);
    } catch (Exception error) {
      // The client's threads would keep the program running.
      error.printStackTrace();
      System.exit(1);
    }
  }

  private static void answerLines(String[] arguments) throws Exception {
    PrintStream answers = System.out;
    // The client's log must not mix with the answers.
    System.setOut(System.err);
    byte[] body = java.nio.file.Files.readAllBytes(java.nio.file.Path.of(arguments[1]));
    TransactionMQProducer producer = producer(arguments[0]);
    List<DefaultMQPushConsumer> consumers = new ArrayList<>();
    for (int n = 0; n < Integer.parseInt(arguments[2]); n++) consumers.add(consumer(arguments[0], n));
    answers.println("ready");
    BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line; (line = lines.readLine()) != null; ) {
      String[] words = line.split(" ");
      int size = Integer.parseInt(words[1]);
      double seconds = Double.parseDouble(words[2]);
      slice = new Slice(slice.number + 1);
      long startedNs = System.nanoTime();
      if (words[0].equals("run")) run(producer, body, size, seconds);
      else pace(producer, body, size, seconds);
      waitForAll(Double.parseDouble(words[3]));
      answers.println(asJson(slice, startedNs, words[0].equals("pace")));
    }
    for (DefaultMQPushConsumer consumer : consumers) consumer.shutdown();
    producer.shutdown();
  }

  private static TransactionMQProducer producer(String nameServer) throws Exception {
    TransactionMQProducer producer = new TransactionMQProducer("bench-producer");
    producer.setNamesrvAddr(nameServer);
    producer.setSendMsgTimeout(10_000);
    producer.setTransactionListener(
        new TransactionListener() {
          @Override
          public LocalTransactionState executeLocalTransaction(Message message, Object number) {
            slice.committedNs.set((Integer) number, System.nanoTime());
            return LocalTransactionState.COMMIT_MESSAGE;
          }

          @Override
          public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
          }
        });
    producer.start();
    for (int attempt = 0; ; attempt++) {
      try {
        producer.createTopic("TBW102", TOPIC, 8, null);
        return producer;
      } catch (Exception error) {
        // The broker registers with the name server some seconds after it listens.
        if (attempt == 60) throw error;
        Thread.sleep(500);
      }
    }
  }

  /** Start one consumer of the group; each has its own connection and its share of the topic's queues. */
  private static DefaultMQPushConsumer consumer(String nameServer, int number) throws Exception {
    DefaultMQPushConsumer consumer = new DefaultMQPushConsumer("bench-consumer");
    consumer.setInstanceName("bench-" + number);
    consumer.setNamesrvAddr(nameServer);
    consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
    consumer.subscribe(TOPIC, "*");
    consumer.registerMessageListener(
        (MessageListenerConcurrently)
            (List<MessageExt> messages, org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyContext c) -> {
              for (MessageExt message : messages) note(message.getKeys());
              return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
    consumer.start();
    return consumer;
  }

  private static void note(String key) {
    long nowNs = System.nanoTime();
    Slice current = slice;
    int dash = key.indexOf('-');
    if (Integer.parseInt(key.substring(0, dash)) != current.number) return;
    if (!current.receivedNs.compareAndSet(Integer.parseInt(key.substring(dash + 1)), 0, nowNs)) {
      current.repeated.incrementAndGet();
      return;
    }
    current.lastNs = Math.max(current.lastNs, nowNs);
    current.received.incrementAndGet();
  }

  private static void one(TransactionMQProducer producer, byte[] body) {
    int number = slice.next.getAndIncrement();
    Message message = new Message(TOPIC, null, slice.number + "-" + number, body);
    try {
      producer.sendMessageInTransaction(message, number);
    } catch (Exception error) {
      if (slice.failed.incrementAndGet() == 1) System.err.println(error);
    }
  }

  private static void run(TransactionMQProducer producer, byte[] body, int atOnce, double seconds) throws Exception {
    long untilNs = System.nanoTime() + (long) (seconds * 1e9);
    Thread[] threads = new Thread[atOnce];
    for (int n = 0; n < atOnce; n++) {
      threads[n] =
          new Thread(
              () -> {
                while (System.nanoTime() < untilNs) one(producer, body);
              });
      threads[n].start();
    }
    for (Thread thread : threads) thread.join();
  }

  private static void pace(TransactionMQProducer producer, byte[] body, int rate, double seconds) throws Exception {
    ExecutorService threads = Executors.newFixedThreadPool(PACED_THREADS);
    long firstNs = System.nanoTime();
    for (int n = 0; n < (int) (rate * seconds); n++) {
      long waitNs = firstNs + (long) (n * 1e9 / rate) - System.nanoTime();
      if (waitNs > 0) LockSupport.parkNanos(waitNs);
      threads.execute(() -> one(producer, body));
    }
    threads.shutdown();
    threads.awaitTermination(1, TimeUnit.MINUTES);
  }

  /** Wait for the messages of all sent transactions, and then a moment for repeated ones. */
  private static void waitForAll(double within) throws Exception {
    long untilNs = System.nanoTime() + (long) (within * 1e9);
    while (slice.received.get() < slice.next.get() - slice.failed.get() && System.nanoTime() < untilNs) {
      Thread.sleep(10);
    }
    Thread.sleep(200);
  }

  private static String asJson(Slice done, long startedNs, boolean times) {
    StringJoiner late = new StringJoiner(",", "[", "]");
    if (times) {
      for (int n = 0; n < done.next.get(); n++) {
        long receivedNs = done.receivedNs.get(n);
        if (receivedNs > 0) late.add(Long.toString((receivedNs - done.committedNs.get(n)) / 1000));
      }
    }
    return String.format(
        "{\"sent\":%d,\"delivered\":%d,\"repeated\":%d,\"failed\":%d,\"seconds\":%.6f,\"late_us\":%s}",
        done.next.get(), done.received.get(), done.repeated.get(), done.failed.get(),
        (done.lastNs - startedNs) / 1e9, late);
  }
}
