//go:build tools

// Package tools names what runs the chart's unit tests.
package tools

import _ "github.com/helm-unittest/helm-unittest/cmd/helm-unittest"
