"""What a compiled step moves or keeps needlessly: findings, and the rules that find them."""
