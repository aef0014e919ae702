// A shop in Java that announces exactly the orders that it commits; docs/protocol.md explains it.
import com.sun.net.httpserver.*;
import java.net.*;
import java.net.http.*;
import java.security.*;
import java.sql.*;
import java.time.*;
import java.util.*;
public class Producer {
  static final HttpClient client = HttpClient.newHttpClient();
  static final String END = "{\"producer_group\": \"shop\", \"transaction_id\": \"%s\", \"verdict\": \"%s\"}";

  static void post(String path, String content, Object... values) throws Exception {
    var to = HttpRequest.newBuilder(URI.create(System.getenv("HALFNOTE_URL") + path)).timeout(Duration.ofSeconds(5));
    to.POST(HttpRequest.BodyPublishers.ofString(content.formatted(values))).header("content-type", "application/json");
    var answer = client.send(to.build(), HttpResponse.BodyHandlers.ofString());
    if (answer.statusCode() >= 300) throw new IllegalStateException(answer.body());
  }

  static String place(int number) throws Exception {
    var id = new UUID(System.currentTimeMillis() << 16 | 0x7030, new SecureRandom().nextLong() >>> 2 | 1L << 63);
    post("/half", """
        {"producer_group": "shop", "transaction_id": "%s", "messages": [
          {"topic": "order", "key": "order-%d", "body": {"order": %2$d}}]}""", id, number);
    try (var connection = DriverManager.getConnection(System.getenv("DATABASE_URL"))) { // elsewhere, from a pool
      connection.setAutoCommit(false);
      write(connection, "insert into halfnote_barrier values (?, 'local')", id); // fails if a check came first
      write(connection, "insert into orders values (?)", number);
      connection.commit();
    } catch (SQLException error) { System.err.println(error); }
    var verdict = "unknown"; // the barrier has the outcome, even of a commit whose answer was lost; or a check finds it
    try { post("/end", END, id, verdict = ask(id)); } catch (Exception error) { System.err.println(error); }
    return id + " " + verdict;
  }

  static void write(Connection connection, String sql, Object value) throws SQLException {
    var statement = connection.prepareStatement(sql);
    statement.setObject(1, value);
    statement.executeUpdate();
  }

  static String ask(UUID id) throws SQLException {
    try (var connection = DriverManager.getConnection(System.getenv("DATABASE_URL"))) { // each statement commits
      connection.createStatement().execute("set lock_timeout = '3s'"); // to wait for a transaction that is still open
      write(connection, "insert into halfnote_barrier values (?, 'rollback') on conflict do nothing", id);
      var read = "select replace(reason, 'local', 'commit') from halfnote_barrier where transaction_id = '" + id + "'";
      var found = connection.createStatement().executeQuery(read);
      return found.next() ? found.getString(1) : "unknown";
    }
  }

  static String check(Headers headers, byte[] body) throws Exception {
    String id = headers.getFirst("webhook-id"), at = headers.getFirst("webhook-timestamp");
    var mac = javax.crypto.Mac.getInstance("HmacSHA256");
    var key = System.getenv("CHECK_SECRET").substring("whsec_".length());
    mac.init(new javax.crypto.spec.SecretKeySpec(Base64.getDecoder().decode(key), "HmacSHA256"));
    mac.update((id + "." + at + ".").getBytes());
    var own = ("v1," + Base64.getEncoder().encodeToString(mac.doFinal(body))).getBytes();
    var given = Arrays.stream(headers.getFirst("webhook-signature").split(" "));
    if (given.noneMatch(one -> MessageDigest.isEqual(one.getBytes(), own))
        || Math.abs(Instant.now().getEpochSecond() - Long.parseLong(at)) > 300) return null;
    return id.startsWith("chk_") ? "{\"verdict\": \"%s\"}".formatted(ask(UUID.fromString(id.substring(4, 40)))) : "";
  }

  public static void main(String[] arguments) throws Exception {
    var server = HttpServer.create(new InetSocketAddress("127.0.0.1", Integer.parseInt(System.getenv("PORT"))), 0);
    server.setExecutor(java.util.concurrent.Executors.newCachedThreadPool());
    server.createContext("/", exchange -> {
      try (exchange) { // an exception ends the request without an answer
        var path = exchange.getRequestURI().getPath().split("/");
        var text = path[1].equals("orders") ? place(Integer.parseInt(path[2]))
            : check(exchange.getRequestHeaders(), exchange.getRequestBody().readAllBytes());
        exchange.sendResponseHeaders(text == null ? 401 : 200, 0);
        exchange.getResponseBody().write(text == null ? new byte[0] : text.getBytes());
      } catch (Exception error) { System.err.println(error); }
    });
    server.start();
  }
}
