// Command compose prints a compose file as Docker understands it, as JSON, with the profiles that are named.
//
//	compose docker-compose.yml [profile …]
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/compose-spec/compose-go/v2/cli"
)

func main() {
	options, err := cli.NewProjectOptions(
		os.Args[1:2], cli.WithOsEnv, cli.WithDotEnv, cli.WithInterpolation(true), cli.WithResolvedPaths(true),
		cli.WithNormalization(true), cli.WithConsistency(true), cli.WithProfiles(os.Args[2:]))
	if err != nil {
		fail(err)
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		fail(err)
	}
	text, err := project.MarshalJSON()
	if err != nil {
		fail(err)
	}
	fmt.Println(string(text))
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}
