// Apache's client for Go: producer, transactions with a checker, a simple consumer, and two push consumers.
//
// Arguments: endpoint, topic, consumer group, access key, secret, and the seconds for which it stays. The group `…-fifo`
// is ordered. It prints what happens as lines of JSON, and ends that many seconds after the consumers have everything
// that is to come.
package main

import (
	"context"
	"encoding/json"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	client "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

var (
	lock     sync.Mutex
	pushed   = map[string]bool{}
	ordered  = map[string]bool{}
	asked    = map[string]bool{}
	failed   = map[string]int{}
	inOrder  = []string{"fifo-0", "fifo-1", "fifo-2"}
	done     = []string{"commit", "orphan-commit", "orphan-unknown", "plain", "delay", "fifo-0", "fifo-1", "fifo-2"}
)

const poisonAttempts = 2

func say(what string, fields map[string]any) {
	lock.Lock()
	defer lock.Unlock()
	fields["what"] = what
	line, _ := json.Marshal(fields)
	os.Stdout.Write(append(line, '\n'))
}

func must[T any](value T, err error) T {
	if err != nil {
		say("failed", map[string]any{"error": err.Error()})
		os.Exit(1)
	}
	return value
}

func has(found map[string]bool, expected ...string) bool {
	for _, body := range expected {
		if !found[body] {
			return false
		}
	}
	return true
}

func hasAll(seen map[string]bool) bool {
	lock.Lock()
	defer lock.Unlock()
	return has(seen, done...) && seen["poison"] && has(pushed, done...) && has(ordered, inOrder...) &&
		min(failed["pushed"], failed["ordered"]) >= poisonAttempts
}

func check(message *client.MessageView) client.TransactionResolution {
	body := string(message.GetBody())
	say("checked", map[string]any{"body": body, "message_id": message.GetMessageId(), "properties": message.GetProperties()})
	lock.Lock()
	defer lock.Unlock()
	if body == "orphan-unknown" && !asked[body] {
		asked[body] = true
		return client.UNKNOWN
	}
	if strings.HasSuffix(body, "rollback") {
		return client.ROLLBACK
	}
	return client.COMMIT
}

func consume(message *client.MessageView) client.ConsumerResult {
	body := string(message.GetBody())
	say("pushed", map[string]any{"body": body, "attempt": message.GetDeliveryAttempt()})
	if body == "plain" && message.GetDeliveryAttempt() == 1 {
		return client.FAILURE
	}
	lock.Lock()
	defer lock.Unlock()
	if body == "poison" {
		failed["pushed"]++
		return client.FAILURE
	}
	pushed[body] = true
	return client.SUCCESS
}

func consumeInOrder(message *client.MessageView) client.ConsumerResult {
	body := string(message.GetBody())
	say("ordered", map[string]any{"body": body})
	lock.Lock()
	defer lock.Unlock()
	if body == "poison" {
		failed["ordered"]++
		return client.FAILURE
	}
	if body == "fifo-1" && !asked[body] {
		asked[body] = true
		return client.FAILURE
	}
	ordered[body] = true
	return client.SUCCESS
}

func main() {
	endpoint, topic, group := os.Args[1], os.Args[2], os.Args[3]
	secrets := &credentials.SessionCredentials{AccessKey: os.Args[4], AccessSecret: os.Args[5]}
	config := func(group string) *client.Config {
		return &client.Config{Endpoint: endpoint, ConsumerGroup: group, Credentials: secrets}
	}
	all := map[string]*client.FilterExpression{topic: client.SUB_ALL}
	simple := must(client.NewSimpleConsumer(config(group),
		client.WithSimpleAwaitDuration(5*time.Second), client.WithSimpleSubscriptionExpressions(all)))
	must(0, simple.Start())
	for name, listener := range map[string]func(*client.MessageView) client.ConsumerResult{
		"-push": consume, "-fifo": consumeInOrder,
	} {
		push := must(client.NewPushConsumer(config(group+name),
			client.WithPushAwaitDuration(5*time.Second), client.WithPushSubscriptionExpressions(all),
			client.WithPushMessageListener(&client.FuncMessageListener{Consume: listener}),
			client.WithPushConsumptionThreadCount(4), client.WithPushMaxCacheMessageCount(1024)))
		must(0, push.Start())
	}
	producer := must(client.NewProducer(config(""), client.WithTopics(topic),
		client.WithTransactionChecker(&client.TransactionChecker{Check: check})))
	must(0, producer.Start())
	say("started", map[string]any{})

	transaction := func(body string) client.Transaction {
		begun := producer.BeginTransaction()
		message := &client.Message{Topic: topic, Body: []byte(body)}
		message.SetTag("created")
		message.AddProperty("shop", "s1")
		receipts := must(producer.SendWithTransaction(context.Background(), message, begun))
		say("sent", map[string]any{"body": body, "message_id": receipts[0].MessageID})
		return begun
	}
	send := func(message *client.Message) {
		receipts := must(producer.Send(context.Background(), message))
		say("sent", map[string]any{"body": string(message.Body), "message_id": receipts[0].MessageID})
	}
	must(0, transaction("commit").Commit())
	must(0, transaction("rollback").RollBack())
	for _, orphan := range []string{"orphan-commit", "orphan-rollback", "orphan-unknown"} {
		transaction(orphan)
	}
	plain := &client.Message{Topic: topic, Body: []byte("plain")}
	plain.SetTag("created")
	plain.SetKeys("k1", "k2")
	plain.AddProperty("shop", "s1")
	send(plain)
	for _, one := range [][2]string{{"fifo-0", "g1"}, {"fifo-1", "g1"}, {"fifo-2", "g1"}, {"poison", "g2"}} {
		grouped := &client.Message{Topic: topic, Body: []byte(one[0])}
		grouped.SetMessageGroup(one[1])
		send(grouped)
	}
	delay := &client.Message{Topic: topic, Body: []byte("delay")}
	delay.SetDelayTimestamp(time.Now().Add(2 * time.Second))
	send(delay)

	seen := map[string]bool{}
	end := time.Now().Add(90 * time.Second)
	for time.Now().Before(end) && !hasAll(seen) {
		found, _ := simple.Receive(context.Background(), 16, 30*time.Second)
		for _, one := range found {
			fields := map[string]any{"body": string(one.GetBody()), "keys": one.GetKeys(), "properties": one.GetProperties(),
				"message_id": one.GetMessageId(), "attempt": one.GetDeliveryAttempt(), "tag": one.GetTag(),
				"group": one.GetMessageGroup()}
			say("received", fields)
			must(0, simple.Ack(context.Background(), one))
			lock.Lock()
			seen[string(one.GetBody())] = true
			lock.Unlock()
		}
	}
	time.Sleep(time.Duration(must(strconv.Atoi(os.Args[6]))) * time.Second)
	say("done", map[string]any{})
	os.Exit(0)
}
