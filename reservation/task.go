package reservation

// TaskReport asks for a person: one per kind, scope and cause, however many
// reservations stand behind it (protocol §3). An hour without RocketMQ is one
// task, not a hundred thousand.
type TaskReport struct {
	Kind   string
	Scope  string // a scope's tag, or empty for the whole installation
	Cause  string
	Count  int
	Sample []string // some of the subjects, at most ten
}
