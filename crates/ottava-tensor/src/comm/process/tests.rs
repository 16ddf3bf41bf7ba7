//! Rendezvous and faults of TCP ranks: strangers, wrong secrets, and missing, dead and stopped ranks.

use super::*;
use crate::comm::tests::on_ranks;
use crate::comm::{Group, Limits};
use crate::error::RankFault;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use std::{env, thread};

fn rendezvous(rank: usize, size: usize, address: &str) -> Rendezvous {
    let [join, silence, collective] = [20, 5, 60].map(Duration::from_secs);
    let limits = Limits { join, silence, collective };
    let identity = vec![("config".into(), "aa".into()), ("program".into(), "11".into())];
    let supervisor = Arc::new(Unsupervised);
    Rendezvous { rank, size, address: address.into(), secret: b"secret".to_vec(), identity, limits, supervisor }
}

fn listener() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

/// Lets each of `size` ranks join after `change`, and returns the results. Ranks that are not in `present` do not join.
fn join_changed(
    size: usize,
    present: &[usize],
    change: impl Fn(&mut Rendezvous) + Sync,
) -> Vec<(usize, Result<Group>)> {
    let (listener, address) = listener();
    thread::scope(|scope| {
        let ranks = present.iter().map(|&rank| {
            let (listener, address, change) = (&listener, &address, &change);
            scope.spawn(move || {
                let mut rendezvous = rendezvous(rank, size, address);
                change(&mut rendezvous);
                let joined = if rank == 0 { server::serve(listener, &rendezvous) } else { client::join(&rendezvous) };
                (rank, joined)
            })
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Returns a group of threads of this process that are connected by TCP. Its collectives have a deadline.
pub(in crate::comm) fn tcp_group_within(size: usize, collective: Duration) -> Vec<Group> {
    let ranks: Vec<_> = (0..size).collect();
    let group = join_changed(size, &ranks, |r| r.limits.collective = collective);
    group.into_iter().map(|(_, comm)| comm.unwrap()).collect()
}

/// Returns a group of threads of this process that are connected by TCP.
pub(in crate::comm) fn tcp_group(size: usize) -> Vec<Group> {
    if size == 1 {
        return vec![join(&rendezvous(0, 1, "")).unwrap()];
    }
    let ranks: Vec<_> = (0..size).collect();
    join_changed(size, &ranks, |_| {}).into_iter().map(|(_, comm)| comm.unwrap()).collect()
}

/// Returns the error messages of ranks whose group does not form.
fn refusals(size: usize, present: &[usize], change: impl Fn(&mut Rendezvous) + Sync) -> Vec<String> {
    let joined = join_changed(size, present, change);
    let message = |(rank, joined): (usize, Result<Group>)| {
        let error = joined.err().unwrap_or_else(|| panic!("rank {rank} joined"));
        assert!(matches!(error, Error::Ranks { fault: RankFault::Rendezvous, .. }), "{error}");
        error.to_string()
    };
    joined.into_iter().map(message).collect()
}

#[test]
fn missing_ranks_are_named_on_all_ranks() {
    for message in refusals(5, &[0, 1, 4], |r| r.limits.join = Duration::from_millis(500)) {
        assert!(message.starts_with("ranks 2, 3 did not join at 127.0.0.1:"), "{message}");
    }
    let message = &refusals(3, &[1], |r| {
        (r.limits.join, r.address) = (Duration::from_millis(300), "127.0.0.1:1".into());
    })[0];
    assert!(message.starts_with("rank 0 did not answer at 127.0.0.1:1 within 300ms"), "{message}");
}

#[test]
fn a_different_identity_is_named_on_all_ranks() {
    let messages = refusals(4, &[0, 1, 2, 3], |r| {
        if r.rank == 2 {
            r.identity[0].1 = "bb".into();
        }
    });
    let expected = "ranks do not run the same job: config is `aa` on ranks 0, 1, 3 and `bb` on rank 2";
    assert_eq!(messages, [expected; 4]);
    let messages = refusals(2, &[0, 1], |r| {
        if r.rank == 1 {
            r.identity.push(("data".into(), "x".into()));
        }
    });
    assert_eq!(messages, ["ranks do not run the same job: data is missing on rank 0 and `x` on rank 1"; 2]);
    for message in refusals(3, &[0, 1, 2], |r| r.size += usize::from(r.rank == 1)) {
        assert!(message.contains("rank 1 (pid") && message.ends_with("belongs to 4 ranks, rank 0 to 3"), "{message}");
    }
    // The third rank claims to be rank 1, too.
    for message in refusals(3, &[0, 1, 2], |r| r.rank = r.rank.min(1)) {
        assert!(message.starts_with("two processes are rank 1: pid "), "{message}");
    }
}

#[test]
fn a_rank_that_ends_during_the_rendezvous_is_named() {
    let (listener, address) = listener();
    let rank_1 = rendezvous(1, 4, &address);
    let deadline = Instant::now() + rank_1.limits.join;
    let messages = thread::scope(|scope| {
        let rank_0 = scope.spawn(|| server::serve(&listener, &rendezvous(0, 4, &address)).err());
        let stream = TcpStream::connect(&address).unwrap();
        rendezvous::introduce(&stream, &rank_1.secret, &rank_1.hello(), deadline).unwrap();
        let rank_2 = scope.spawn(|| client::join(&rendezvous(2, 4, &address)).err());
        thread::sleep(Duration::from_millis(50));
        drop(stream);
        [rank_0, rank_2].map(|rank| rank.join().unwrap().expect("no group").to_string())
    });
    let expected = format!("rank 1 ({}) ended during the rendezvous", crate::comm::fault::this_process());
    assert_eq!(messages, [expected.clone(), expected]);
}

#[test]
fn a_fault_that_overtakes_the_refusal_does_not_hide_it() {
    let (listener, address) = listener();
    let rank_1 = rendezvous(1, 2, &address);
    let deadline = Instant::now() + rank_1.limits.join;
    let message = thread::scope(|scope| {
        let joined = scope.spawn(|| client::join(&rank_1).err());
        let (mut stream, _) = listener.accept().unwrap();
        rendezvous::accept(&stream, &rank_1.secret, deadline).unwrap();
        let fault = wire::encode_fault(&crate::comm::fault::Fault::ended(2, "pid 7"));
        frame::write(&mut stream, frame::Kind::Fault, &[&fault]).unwrap();
        frame::write(&mut stream, frame::Kind::Refused, &[b"the reason"]).unwrap();
        joined.join().unwrap().expect("no group").to_string()
    });
    assert_eq!(message, "the reason");
}

/// A program that was asked to stop, or that is notified that another program was asked to stop.
#[derive(Default)]
struct Stopped(AtomicBool);

impl Supervisor for Stopped {
    fn stop_flag(&self) -> Option<&AtomicBool> {
        Some(&self.0)
    }
}

#[test]
fn a_request_to_stop_reaches_all_ranks() {
    for asked in 0..3 {
        let programs: Vec<_> = (0..3).map(|_| Arc::<Stopped>::default()).collect();
        let group = join_changed(3, &[0, 1, 2], |r| r.supervisor = programs[r.rank].clone());
        let group: Vec<_> = group.into_iter().map(|(_, comm)| comm.unwrap()).collect();
        assert!(programs.iter().all(|program| !program.stop_requested()));
        let stopper = group[asked].stopper();
        stopper.request();
        let begin = Instant::now();
        while !programs.iter().all(|program| program.stop_requested()) {
            assert!(begin.elapsed() < Duration::from_secs(10), "rank {asked} was asked");
            thread::sleep(Duration::from_millis(5));
        }
        on_ranks(group, |comm| comm.finish().unwrap());
        stopper.request();
    }
}

#[test]
fn a_request_to_stop_ends_a_rendezvous_on_all_ranks() {
    // Rank 3 never joins.
    for asked in 0..3 {
        let programs: Vec<_> = (0..3).map(|_| Arc::<Stopped>::default()).collect();
        let begin = Instant::now();
        let messages = refusals(4, &[0, 1, 2], |r| {
            r.supervisor = programs[r.rank].clone();
            if r.rank == asked {
                let program = programs[asked].clone();
                thread::spawn(move || {
                    thread::sleep(Duration::from_millis(300));
                    program.request_stop();
                });
            }
        });
        assert_eq!(messages, [rendezvous::STOPPED; 3], "rank {asked} was asked");
        assert!(programs.iter().all(|program| program.stop_requested()));
        assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    }
}

/// A supervisor that knows how rank 1 ended, or that rank 1 never joined.
struct Witness(bool);

impl Supervisor for Witness {
    fn check(&self) -> Result<(), String> {
        if self.0 { Err("rank 1 was killed by signal 9 before it joined".into()) } else { Ok(()) }
    }

    fn describe_end(&self, rank: usize) -> Option<String> {
        Some(format!("rank {rank} was killed by signal 9"))
    }
}

#[test]
fn what_rank_0_knows_of_an_end_is_told_to_all() {
    let group = join_changed(3, &[0, 1, 2], |r| r.supervisor = Arc::new(Witness(false)));
    let messages = on_ranks(group.into_iter().map(|(_, comm)| comm.unwrap()).collect(), |comm| {
        (comm.rank() != 1).then(|| comm.barrier("last").unwrap_err().to_string())
    });
    for message in messages.into_iter().flatten() {
        assert!(
            message.ends_with("ended during barrier `last`, collective 1; rank 1 was killed by signal 9"),
            "{message}"
        );
    }
    // Ranks do not wait for a rank that ends before it joins.
    let messages = refusals(3, &[0, 2], |r| {
        if r.rank == 0 {
            r.supervisor = Arc::new(Witness(true));
        }
    });
    assert_eq!(messages, ["rank 1 was killed by signal 9 before it joined"; 2]);
}

#[test]
fn another_secret_is_refused() {
    let messages = refusals(2, &[0, 1], |r| {
        r.limits.join = Duration::from_millis(500);
        if r.rank == 1 {
            r.secret = b"guess".to_vec();
        }
    });
    assert!(
        messages[0].starts_with("rank 1 did not join") && messages[0].ends_with("had a different secret"),
        "{messages:?}"
    );
    assert!(messages[1].ends_with("has a different secret from rank 1"), "{messages:?}");
}

#[test]
fn strangers_do_not_disturb_the_group() {
    let (listener, address) = listener();
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(&address).unwrap()).collect();
    let bodies = [&b"GET / HTTP/1.0\r\n\r\n"[..], b"OTVCMM\x04\x01\xff\xff\xff\xff\xff\xff\xff\xff", &[0; 100_000]];
    let noisy = bodies.iter().map(|body| {
        let mut stream = TcpStream::connect(&address).unwrap();
        // Rank 0 may close the connection before it has read everything.
        let _ = stream.write_all(body);
        stream
    });
    let noisy: Vec<_> = noisy.collect();
    let joined = thread::scope(|scope| {
        let ranks = (0..3).map(|rank| {
            let (listener, address) = (&listener, &address);
            scope.spawn(move || {
                let rendezvous = rendezvous(rank, 3, address);
                if rank == 0 { server::serve(listener, &rendezvous) } else { client::join(&rendezvous) }.unwrap()
            })
        });
        let ranks: Vec<_> = ranks.collect();
        thread::sleep(Duration::from_millis(100));
        drop(silent);
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    on_ranks(joined, |comm| comm.barrier("with strangers").unwrap());
    drop(noisy);
}

#[test]
fn garbage_is_no_message() {
    let header = |length: u64| [&b"OTVCMM\x04\x07"[..], &length.to_le_bytes()].concat();
    let read = |bytes: &[u8]| frame::read(&mut &bytes[..], 100).map_err(|e| e.kind());
    use std::io::ErrorKind::{InvalidData, UnexpectedEof};
    assert_eq!(read(&[header(1), vec![5]].concat()), Ok((frame::Kind::Call, vec![5])));
    assert_eq!(read(&header(101)), Err(InvalidData));
    assert_eq!(read(&header(5)), Err(UnexpectedEof));
    assert_eq!(read(&[0; 16]), Err(InvalidData));
    assert_eq!(read(&[&b"OTVCMM\x04\x63"[..], &[0; 8]].concat()), Err(InvalidData));
    // Truncated or changed bodies are rejected or decoded, without a panic.
    let call = crate::comm::call::Call::control(crate::comm::call::Op::Barrier, "x");
    let call = wire::encode_call(&wire::CallHead { request: 3, group: 0, number: 2, call });
    for end in 0..call.len() {
        assert!(wire::decode_call(&call[..end]).is_none(), "{end}");
    }
    let hello = rendezvous(1, 2, "").hello();
    assert_eq!(wire::Hello::decode(&hello.encode()), Some(hello));
    assert!(wire::Hello::decode(&[255; 40]).is_none());
}

#[test]
fn computing_longer_than_the_silence_limit_is_no_fault() {
    let ranks: Vec<_> = (0..3).collect();
    let group = join_changed(3, &ranks, |r| r.limits.silence = Duration::from_secs(2));
    on_ranks(group.into_iter().map(|(_, comm)| comm.unwrap()).collect(), |comm| {
        thread::sleep(Duration::from_secs(3));
        comm.barrier("after computing").unwrap();
    });
}

/// Returns the group of this process, if [`Rank::group`] has started the process.
pub(in crate::comm) fn join_as_child() -> Option<Group> {
    let number = |name: &str| env::var(name).ok()?.parse().ok();
    let (rank, size, address) =
        (number("OTTAVA_TEST_RANK")?, number("OTTAVA_TEST_SIZE")?, env::var("OTTAVA_TEST_ADDRESS").ok()?);
    let mut rendezvous = rendezvous(rank, size, &address);
    rendezvous.limits.silence = Duration::from_secs(2);
    rendezvous.limits.collective = Duration::from_secs(3);
    let comm = match rank {
        0 => {
            let (listener, address) = listener();
            println!("address: {address}");
            lead(&listener, &rendezvous)
        }
        _ => join(&rendezvous),
    };
    Some(comm.unwrap())
}

/// Runs in a separate process. Joins and makes calls until an error, which it prints.
#[test]
#[ignore = "started by the tests below"]
fn rank_process() {
    let Some(world) = join_as_child() else { return };
    let ring = world.split("ring", 0, 0).unwrap();
    println!("joined");
    let [next, previous] = [1, ring.size() - 1].map(|step| (ring.rank() + step) % ring.size());
    let x = || crate::Tensor::zeros(&crate::Device::Cpu, &[1000], crate::DType::F32).unwrap();
    let call = || match env::var("OTTAVA_TEST_CALL").as_deref() {
        Ok("exchange") => ring.exchange("keys", next, &x(), previous, x())?.wait().map(drop),
        Ok("split") => ring.split("part", ring.rank(), 0).map(drop),
        _ => world.all_reduce("grad norm", crate::comm::Reduce::Sum, x())?.wait().map(drop),
    };
    let error = loop {
        if let Err(error) = call() {
            break error;
        }
    };
    println!("error: {error}");
}

/// A child process that does not outlive its test.
pub(in crate::comm) struct Rank(pub Child, BufReader<ChildStdout>);

impl Drop for Rank {
    fn drop(&mut self) {
        // These calls fail if the process has already ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Rank {
    /// Starts the ignored `test` as each rank of a group. Each rank must print "joined".
    pub fn group(test: &str, size: usize, variables: &[(&str, &str)]) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = Vec::new();
        let mut address = String::new();
        for rank in 0..size {
            ranks.push(Rank::start(test, rank, size, &address, variables));
            if rank == 0 {
                address = ranks[0].line("address: ");
            }
        }
        ranks.iter_mut().for_each(|rank| drop(rank.line("joined")));
        ranks
    }

    fn start(test: &str, rank: usize, size: usize, address: &str, variables: &[(&str, &str)]) -> Rank {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("OTTAVA_TEST_RANK", rank.to_string())
            .env("OTTAVA_TEST_SIZE", size.to_string())
            .env("OTTAVA_TEST_ADDRESS", address)
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Rank(child, output)
    }

    /// Returns the rest of a line that contains `mark`.
    pub fn line(&mut self, mark: &str) -> String {
        let mut line = String::new();
        while !line.contains(mark) {
            line.clear();
            if self.1.read_line(&mut line).unwrap() == 0 {
                panic!("the process ended before `{mark}`: {}", self.errors());
            }
        }
        line.split_once(mark).unwrap().1.trim().to_string()
    }

    /// Returns the text that the process has written to standard error. Waits for the end of the process.
    pub fn errors(&mut self) -> String {
        let mut text = String::new();
        self.0.stderr.take().expect("read once").read_to_string(&mut text).unwrap();
        text
    }
}

#[test]
fn a_dead_or_stopped_process_is_named() {
    for (signal, lost, how) in [("KILL", 1, "ended"), ("KILL", 0, "ended"), ("STOP", 2, "sent nothing for 2s")] {
        let mut ranks = Rank::group("comm::process::tests::rank_process", 3, &[]);
        let pid = ranks[lost].0.id();
        let sent = Instant::now();
        assert!(Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap().success());
        for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != lost) {
            let message = process.line("error: ");
            let expected = format!("rank {lost} (pid {pid} on host ");
            assert!(message.starts_with(&expected), "{signal} {lost}, rank {rank}: {message}");
            assert!(message.contains(&format!("{how} during all_reduce `grad norm`, collective ")), "{message}");
            assert!(sent.elapsed() < Duration::from_secs(10), "{signal} {lost}: {:?}", sent.elapsed());
            process.1.read_to_string(&mut String::new()).unwrap();
            assert!(process.0.wait().unwrap().success(), "rank {rank} ends by itself");
        }
    }
}

#[test]
fn a_dead_or_stopped_process_ends_messages_and_splits() {
    for (call, signal, how) in
        [("exchange", "KILL", "ended"), ("exchange", "STOP", "sent nothing for 2s"), ("split", "KILL", "ended")]
    {
        let mut ranks = Rank::group("comm::process::tests::rank_process", 3, &[("OTTAVA_TEST_CALL", call)]);
        let pid = ranks[1].0.id();
        let sent = Instant::now();
        assert!(Command::new("kill").args([format!("-{signal}"), pid.to_string()]).status().unwrap().success());
        for rank in [0, 2] {
            let message = ranks[rank].line("error: ");
            let expected = format!("rank 1 (pid {pid} on host ");
            assert!(message.starts_with(&expected), "{call}, rank {rank}: {message}");
            assert!(message.contains(&format!("{how} during ")), "{call}, rank {rank}: {message}");
            assert!(message.contains(" of group `ring` (ranks 0 to 2)"), "{call}, rank {rank}: {message}");
            assert!(sent.elapsed() < Duration::from_secs(10), "{call}: {:?}", sent.elapsed());
        }
    }
}
