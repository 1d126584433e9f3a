package lua

import (
	"crypto/sha1" //nolint:gosec // Redis names scripts by their SHA-1
	"embed"
	"encoding/hex"
)

//go:embed *.lua
var files embed.FS

// script is one .lua file.
type script struct {
	name    string
	source  string
	sha     string
	command string // EVALSHA, or EVALSHA_RO for a script that never writes
}

func load(name string) *script {
	source, err := files.ReadFile(name + ".lua")
	if err != nil {
		panic("lua: " + err.Error()) // the file is embedded: this cannot happen in a built binary
	}
	return &script{name: name, source: string(source), sha: scriptSHA(string(source)), command: "evalsha"}
}

func scriptSHA(source string) string {
	sum := sha1.Sum([]byte(source)) //nolint:gosec // see the import
	return hex.EncodeToString(sum[:])
}

func loadReadOnly(name string) *script {
	s := load(name)
	s.command = "evalsha_ro"
	return s
}

// codeText names a reply code of any script.
func codeText[C ~int64](names map[C]string, c C) string {
	if name, ok := names[c]; ok {
		return name
	}
	return "UNKNOWN_CODE"
}
