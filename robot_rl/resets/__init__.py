"""Makes banks of states in which episodes begin; `robot_rl.sim.start_bank` draws from them."""
