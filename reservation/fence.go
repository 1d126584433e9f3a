package reservation

// FenceRequest asks for a reservation to be fenced: no order can be created
// under its id afterwards (protocol §1).
type FenceRequest struct {
	ID    string
	Scope Scope
}

// FenceResult is the claim in force after a fence was tried.
type FenceResult struct {
	ID      string
	Known   bool // false: not decided, ask again later
	Won     bool // the fence was set now; false: another claim was there before
	Outcome Outcome
	OrderID string // of a claim ORDER
}
