//! A test program that also runs as the second process.

use std::future::Future;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};

use libtest_mimic::{Arguments, Trial};

/// A second process, and the lines that it prints.
pub struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    pub fn start(variables: &[(&str, &str)]) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.envs(variables.iter().copied());
        Process::run(command)
    }

    pub fn run(mut command: Command) -> Process {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Process { child, lines }
    }

    /// Waits for a line that contains this word, and returns the text behind the word.
    pub fn says(&mut self, word: &str) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let found =
            lines.find_map(|line| line.split_once(word).map(|(_, rest)| rest.trim().to_owned()));
        found.expect("the other process has ended")
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process ends, and returns whether it succeeded.
    pub fn ends_well(&mut self) -> bool {
        self.child.wait().unwrap().success()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the tests one after the other, because some count the resources of the process.
pub fn run(trials: impl IntoIterator<Item = Trial>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials.into_iter().collect()).exit_code()
}

/// Makes a test that runs in its own runtime.
pub fn self_test<F: Future<Output = ()>>(
    name: &str,
    test: impl FnOnce() -> F + Send + 'static,
) -> Trial {
    Trial::test(name, move || {
        block_on(test());
        Ok(())
    })
}

pub fn block_on<F: Future<Output = ()>>(future: F) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future);
}
