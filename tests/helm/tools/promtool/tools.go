//go:build tools

// Package tools names what checks and plays the chart's alerts.
package tools

import _ "github.com/prometheus/prometheus/cmd/promtool"
