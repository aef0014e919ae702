// Sends two-phase messages to DTM and takes their calls: `driver DTM_URL BODY_FILE`.
//
// Prints `ready`. Each line `run AT_ONCE SECONDS WITHIN` or `pace RATE SECONDS WITHIN` on stdin is one slice, and its
// answer is a line of JSON. WITHIN is how many seconds the last calls may take after the last submit.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dtm-labs/dtm/client/dtmcli"
	"github.com/dtm-labs/logger"
)

const most = 500_000

var began = time.Now()

// slice holds the times of one slice, by the number of the message.
type slice struct {
	number                           int
	next, received, repeated, failed int64
	committed, at                    []int64
	last                             int64
}

var current atomic.Pointer[slice]

func now() int64 { return int64(time.Since(began)) + 1 }

func take(_ http.ResponseWriter, request *http.Request) {
	at, of := now(), current.Load()
	var run, number int
	var process int64
	if _, err := fmt.Sscanf(request.URL.Query().Get("gid"), "bench-%d-%d-%d", &process, &run, &number); err != nil {
		return
	}
	if run != of.number {
		return
	}
	if !atomic.CompareAndSwapInt64(&of.at[number], 0, at) {
		atomic.AddInt64(&of.repeated, 1)
		return
	}
	for last := atomic.LoadInt64(&of.last); at > last; last = atomic.LoadInt64(&of.last) {
		if atomic.CompareAndSwapInt64(&of.last, last, at) {
			break
		}
	}
	atomic.AddInt64(&of.received, 1)
}

func one(dtm, here string, body any) {
	of := current.Load()
	number := int(atomic.AddInt64(&of.next, 1) - 1)
	gid := fmt.Sprintf("bench-%d-%d-%d", began.UnixNano(), of.number, number)
	err := dtmcli.NewMsg(dtm, gid).Add(here+"/hook", body).
		DoAndSubmit(here+"/query", func(*dtmcli.BranchBarrier) error {
			atomic.StoreInt64(&of.committed[number], now())
			return nil
		})
	if err != nil && atomic.AddInt64(&of.failed, 1) == 1 {
		fmt.Fprintln(os.Stderr, err)
	}
}

func run(atOnce int, seconds float64, one func()) {
	var callers sync.WaitGroup
	until := time.Now().Add(time.Duration(seconds * 1e9))
	for n := 0; n < atOnce; n++ {
		callers.Add(1)
		go func() {
			defer callers.Done()
			for time.Now().Before(until) {
				one()
			}
		}()
	}
	callers.Wait()
}

func pace(rate int, seconds float64, one func()) {
	var callers sync.WaitGroup
	first := time.Now()
	for n := 0; n < int(float64(rate)*seconds); n++ {
		time.Sleep(time.Until(first.Add(time.Duration(n) * time.Second / time.Duration(rate))))
		callers.Add(1)
		go func() {
			defer callers.Done()
			one()
		}()
	}
	callers.Wait()
}

// waitForAll waits for the calls of all transactions, and then a moment for repeated ones.
func waitForAll(of *slice, within float64) {
	until := time.Now().Add(time.Duration(within * 1e9))
	for atomic.LoadInt64(&of.received) < of.next-of.failed && time.Now().Before(until) {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(200 * time.Millisecond)
}

func answer(of *slice, started int64, times bool) string {
	late := []int64{}
	for n := int64(0); times && n < of.next; n++ {
		if at := atomic.LoadInt64(&of.at[n]); at > 0 {
			late = append(late, (at-of.committed[n])/1000)
		}
	}
	text, _ := json.Marshal(map[string]any{
		"sent": of.next, "delivered": atomic.LoadInt64(&of.received), "repeated": atomic.LoadInt64(&of.repeated),
		"failed": of.failed, "seconds": float64(of.last-started) / 1e9, "late_us": late,
	})
	return string(text)
}

func serve() string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/hook", take)
	http.HandleFunc("/query", func(http.ResponseWriter, *http.Request) {})
	go func() { _ = http.Serve(listener, nil) }()
	return "http://" + listener.Addr().String()
}

func main() {
	logger.InitLog("error")
	bytes, err := os.ReadFile(os.Args[2])
	if err != nil {
		panic(err)
	}
	var body map[string]any
	if err := json.Unmarshal(bytes, &body); err != nil {
		panic(err)
	}
	// By default this client keeps three idle connections, and opens a new one for most requests of 64 callers.
	if transport, ok := dtmcli.GetRestyClient().GetClient().Transport.(*http.Transport); ok {
		transport.MaxIdleConns, transport.MaxIdleConnsPerHost = 256, 256
	}
	dtm, here := os.Args[1]+"/api/dtmsvr", serve()
	fmt.Println("ready")
	lines := bufio.NewScanner(os.Stdin)
	for number := 1; lines.Scan(); number++ {
		var kind string
		var size int
		var seconds, within float64
		if _, err := fmt.Sscan(strings.TrimSpace(lines.Text()), &kind, &size, &seconds, &within); err != nil {
			panic(err)
		}
		of := &slice{number: number, committed: make([]int64, most), at: make([]int64, most)}
		current.Store(of)
		started := now()
		if kind == "run" {
			run(size, seconds, func() { one(dtm, here, body) })
		} else {
			pace(size, seconds, func() { one(dtm, here, body) })
		}
		waitForAll(of, within)
		fmt.Println(answer(of, started, kind == "pace"))
	}
}
