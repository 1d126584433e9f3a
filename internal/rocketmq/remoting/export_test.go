package remoting

// Sign exposes the ACL signature to the tests.
func (p *Peer) Sign(ext map[string]string, body []byte) map[string]string { return p.sign(ext, body) }
