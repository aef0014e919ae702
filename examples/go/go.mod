module halfnote.example/producer

go 1.22

require (
	github.com/google/uuid v1.6.0
	github.com/lib/pq v1.12.3
	github.com/standard-webhooks/standard-webhooks/libraries v0.0.1
)
