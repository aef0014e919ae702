// A shop in Go that announces exactly the orders that it commits; docs/protocol.md explains it.
package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	_ "github.com/lib/pq"
	webhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

var db = must(sql.Open("postgres", os.Getenv("DATABASE_URL")))
var webhook = must(webhooks.NewWebhook(os.Getenv("CHECK_SECRET")))
var client = http.Client{Timeout: 5 * time.Second}

func must[T any](value T, err error) T { // a panic ends a request without an answer
	if err != nil {
		panic(err)
	}
	return value
}

func post(path, content string, values ...any) error {
	body := strings.NewReader(fmt.Sprintf(content, values...))
	answer, err := client.Post(os.Getenv("HALFNOTE_URL")+path, "application/json", body)
	if err == nil && answer.Body.Close() == nil && answer.StatusCode >= 300 {
		err = errors.New(answer.Status)
	}
	return err
}

func place(w http.ResponseWriter, r *http.Request) {
	id, number := must(uuid.NewV7()).String(), must(strconv.Atoi(r.PathValue("number")))
	must(id, post("/half", `{"producer_group": "shop", "transaction_id": %q, "messages": [
		{"topic": "order", "key": "order-%d", "body": {"order": %[2]d}}]}`, id, number))
	defer func() {
		failure := recover()
		verdict := ask(id) // the barrier has the outcome, even of a commit whose answer was lost
		if err := post("/end", `{"producer_group":"shop","transaction_id":%q,"verdict":%q}`, id, verdict); err != nil {
			fmt.Fprintln(os.Stderr, err) // Halfnote sends a check
		}
		fmt.Fprintln(w, id, verdict, failure)
	}()
	tx := must(db.Begin())
	defer tx.Rollback()
	must(tx.Exec("insert into halfnote_barrier values ($1, 'local')", id)) // fails if a check came first
	must(tx.Exec("insert into orders values ($1)", number))
	must(id, tx.Commit())
}

func ask(id string) (verdict string) {
	tx := must(db.Begin())
	defer tx.Rollback()
	must(tx.Exec("set local lock_timeout = '3s'")) // how long to wait for a local transaction that is still open
	must(tx.Exec("insert into halfnote_barrier values ($1, 'rollback') on conflict do nothing", id))
	read := "select replace(reason, 'local', 'commit') from halfnote_barrier where transaction_id = $1"
	must(id, tx.QueryRow(read, id).Scan(&verdict))
	return must(verdict, tx.Commit())
}

func main() {
	http.HandleFunc("POST /orders/{number}", place)
	http.HandleFunc("POST /halfnote/check", func(w http.ResponseWriter, r *http.Request) {
		if err := webhook.Verify(must(io.ReadAll(r.Body)), r.Header); err != nil {
			http.Error(w, err.Error(), http.StatusUnauthorized)
		} else if id, asked := strings.CutPrefix(r.Header.Get("webhook-id"), "chk_"); asked { // else it is a ping
			fmt.Fprintf(w, `{"verdict": %q}`, ask(id[:36]))
		}
	})
	panic(http.ListenAndServe("127.0.0.1:"+os.Getenv("PORT"), nil))
}
